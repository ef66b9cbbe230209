"""Starts a thread when it is imported, so that no worker is forked after it."""

import threading
import time

threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
