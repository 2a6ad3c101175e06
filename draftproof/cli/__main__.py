from draftproof.cli import main

main()
