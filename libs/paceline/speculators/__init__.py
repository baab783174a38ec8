"""Draft models behind one protocol (base.py), one network (net.py) for engine and trainer.

kinds.py lists them and imports no torch: import from the modules, not from here.
"""
