"""The command gtp-vit: thin, each command calls a tool and renders what it returns."""
