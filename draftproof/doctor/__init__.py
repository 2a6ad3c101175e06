"""Does the running engine do what the drafter's config demands? Link by link: proved, refuted, or cannot tell."""
