# Ends the processes of PostgreSQL that work in the directories "$@" by a fast shutdown, after 10 s by an immediate one,
# after 6 s more by SIGKILL. Fails if they run on.
signal_all() {
    found=
    for process in /proc/[0-9]*; do
        for dir; do
            if [ "$process/cwd" -ef "$dir" ] && read -r name <"$process/comm"; then
                case $name in *postgres* | initdb)
                    found=1
                    kill -s "$signal" "${process##*/}"
                    ;;
                esac
            fi
        done
    done 2>/dev/null
}
turn=0
signal=INT
while signal_all "$@"; [ "$found" ]; do
    turn=$((turn + 1))
    case $turn in 200) signal=QUIT ;; 320) signal=KILL ;; 360) exit 1 ;; esac
    sleep 0.05
done
