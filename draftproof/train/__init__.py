"""Make a drafter for a target: recipe -> regen -> capture -> loop -> export -> parity."""
