# Sourced by the job after script.sh has started: the session is ready once the server listens, and ends at once if it cannot start.
until (: <"/dev/tcp/127.0.0.1/${port}") 2>/dev/null; do
  kill -0 "${SCRIPT_PID}" 2>/dev/null || clean_up 1
  sleep 1
done
