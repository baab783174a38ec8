"""Reports a run: figures from journal, ledger and spans, and a page that shows them."""
