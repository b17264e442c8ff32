from k3patches.cli import main

main()
