"""Version 1 of the API; see selfdraft.proto for what every field means."""
