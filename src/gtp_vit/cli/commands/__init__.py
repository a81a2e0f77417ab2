"""The commands, one file each; what they share is in the folder above."""
