"""DFlash (Chen et al. 2026): a block of drafts by one forward."""
