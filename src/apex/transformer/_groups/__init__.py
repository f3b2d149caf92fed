"""How the process groups of a split model are laid out and made."""
