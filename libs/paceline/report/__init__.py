"""What a run did, for a reader: figures from journal, ledger and spans, and the page that shows
them.
"""
