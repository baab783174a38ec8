"""Reports a run: figures from journal and ledger, a page that shows them, and slow steps."""
