"""The words of random sentences, which tiny tokenizers know."""

_TEXT = "the of and to in is that for it as was with be by on not he his but at are this have"
WORDS = _TEXT.split()
