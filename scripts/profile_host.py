"""What a pipeline does on the CPU around its models, by the functions that it calls.

python scripts/profile_host.py --model sdxl --size 512 --steps 1 --guidance 0
"""

from sdfastgn.cli import main

if __name__ == "__main__":
    main(__doc__, "profile-host")
