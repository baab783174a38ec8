"""Reports what a run did: figures from journal, ledger and spans, and the page that shows them."""
