# Sets $found to the processes that work in the directories: each initdb, and each program with this part of a name.
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

# Waits until each initdb has ended, at most 10 s. An initdb that a signal or a renamed directory ends would leave shared
# memory until the machine starts again.
wait_for_initdb() { # directories
    turn=0
    while find_all initdb "$@"; [ "$found" ] && [ $turn -lt 200 ]; do
        turn=$((turn + 1))
        sleep 0.05
    done
}

# Ends the server of `pgdata` by a fast shutdown, if it runs. Waits until the server has ended.
end_server() {
    while read -r server <pgdata/postmaster.pid && [ "/proc/$server/cwd" -ef pgdata ] && kill -s INT "$server"; do
        sleep 0.05
    done
} 2>/dev/null

# Ends each postgres that works in the directories: by a fast shutdown, after 10 s by an immediate one, after 6 s more by
# SIGKILL. Fails if one runs on after 2 s more.
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

# Ends the server in a directory, and removes the directory. Renames it first, so that the next process can make it anew at
# once.
remove() { # directory
    trap '' HUP INT QUIT TERM
    cd /
    wait_for_initdb "$1"
    mv "$1" "$1.$$" || exit
    end_all "$1.$$" "$1.$$/pgdata" "$1.$$/pgdata.new"
    rm -rf "$1.$$"
}

# Waits until no process has locked `users` for ten seconds, or until the server has ended. Then removes the directory.
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
