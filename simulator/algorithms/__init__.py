"""The rows of the catalogue: a file per algorithm, with its configuration and the player's words."""
