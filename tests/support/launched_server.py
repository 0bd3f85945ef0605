"""A server that is started as inference servers are, and the command that starts it."""

from __future__ import annotations

from spot_async.backends.shared.launch import Command

# Answers 503 until half a second has passed, as servers do while they load; has a worker in a session of its own.
SERVER = """
import http.server, json, os, socketserver, subprocess, sys, time
started = time.monotonic()
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            self.send_error(500, "the engine has failed")
            self.wfile.flush()
            time.sleep(0.3)
            print("ValueError: no such attention", file=sys.stderr, flush=True)
            os._exit(7)
        ready = self.path != "/health" or time.monotonic() > started + 0.5
        told = {"pid": os.getpid(), "worker": worker.pid, "devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
                "own": os.environ.get("OWN"), "model": sys.argv[2], "key": self.headers["Authorization"]}
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())

class Server(socketserver.TCPServer):  # an HTTPServer would ask for its host's name
    allow_reuse_address = True

Server((sys.argv[3], int(sys.argv[1])), Handler).serve_forever()
"""


def serve(settings, model, doorway):
    argv = [settings.python, "-c", SERVER, str(doorway.port), str(model), doorway.host]
    return Command(argv, {"OWN": "adapter"}, "json")
