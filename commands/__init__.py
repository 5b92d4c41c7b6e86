"""The commands of `shapetune`, thin: each reads its options and calls one function."""
