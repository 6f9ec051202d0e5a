"""Ends the process that imports it when its parent ends: the one that others are forked from."""

from kdist.launch.watchdog import end_with_parent

end_with_parent()
