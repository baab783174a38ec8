"""Draft models behind one protocol (base.py), with one network (net.py) for engine and trainer.

kinds.py lists them without torch. Import from the modules, not from this package.
"""
