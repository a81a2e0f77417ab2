"""The command gtp-vit: each command reads its flags, calls the package, and prints what `show` makes of the result."""
