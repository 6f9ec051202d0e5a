"""A small program a server; each loads the same SavedModel, and none imports kdist."""
