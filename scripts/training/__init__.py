"""What scripts/train.py does with its flags, part by part."""
