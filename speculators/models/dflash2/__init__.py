"""DFlash 2: DFlash with convolutions along the block and a selector that picks among each slot's best candidates."""
