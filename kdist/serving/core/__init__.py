"""Types that all parts of the model server share."""
