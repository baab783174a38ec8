"""What every engine needs of a request: admission, draws, penalties, grammars."""
