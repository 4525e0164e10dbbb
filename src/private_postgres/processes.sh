# Sets $found to the processes of initdb, and of the programs named, that work in the directories.
find_all() { # part of a name, directories
    wanted=$1 found=
    shift
    for process in /proc/[0-9]*; do
        for dir; do
            if [ "$process/cwd" -ef "$dir" ] && read -r name <"$process/comm"; then
                case $name in *initdb* | *"$wanted"*) found="$found ${process##*/}" ;; esac
            fi
        done
    done
} 2>/dev/null

# Waits for each initdb, at most 10 s: its server would die of a signal, or of a directory that gets another name, and leave
# shared memory until the machine starts again.
wait_for_initdb() { # directories
    turn=0
    while find_all initdb "$@"; [ "$found" ] && [ $turn -lt 200 ]; do
        turn=$((turn + 1))
        sleep 0.05
    done
}

# Ends the server of `pgdata`, if it runs, by a fast shutdown, and waits for as long as that takes.
end_server() {
    while read -r server <pgdata/postmaster.pid && [ "/proc/$server/cwd" -ef pgdata ] && kill -s INT "$server"; do
        sleep 0.05
    done
} 2>/dev/null

# Ends what works in the directories by a fast shutdown, after 10 s by an immediate one, after 6 s more by SIGKILL. Fails if
# it runs on.
end_all() { # directories
    wait_for_initdb "$@"
    turn=0 signal=INT
    while find_all postgres "$@"; [ "$found" ]; do
        kill -s $signal $found 2>/dev/null
        turn=$((turn + 1))
        case $turn in 200) signal=QUIT ;; 320) signal=KILL ;; 360) return 1 ;; esac
        sleep 0.05
    done
}

# Gives a directory another name, so that the next process makes it anew at once, and removes it.
remove() { # directory
    trap '' HUP INT QUIT TERM
    cd /
    wait_for_initdb "$1"
    mv "$1" "$1.$$" || exit
    end_all "$1.$$" "$1.$$/pgdata" "$1.$$/pgdata.new"
    rm -rf "$1.$$"
}

# Waits until no process has had a lock of `users` for ten seconds, or the server has ended, and removes the directory.
keep() { # directory
    idle=0
    exec 8>>users
    while [ $idle -lt 20 ] && read -r server <pgdata/postmaster.pid && [ "/proc/$server/cwd" -ef pgdata ]; do
        flock -u 8
        sleep 0.5
        if flock -nx 8; then idle=$((idle + 1)); else idle=0; fi
    done
    remove "$1"
} 2>/dev/null
