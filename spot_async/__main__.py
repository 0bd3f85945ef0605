"""`python -m spot_async` is the `spot-async` command."""

from spot_async.cli import main

main()
