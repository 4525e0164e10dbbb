"""A machine of 256 MB with one core, for .ci/vm and .ci/power: Debian under the emulation of qemu, without KVM, and without a network but
for two forwarded ports. nbdkit serves its disk, and forgets what the machine has not flushed if the power is cut.

Needs root, mmdebstrap, qemu-system-x86, nbdkit and e2fsprogs. The images are made once and lie in target/vm; delete them
for newer packages of Debian. As a command, this module makes them."""

import contextlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.client import HTTPConnection, HTTPException
from pathlib import Path

root = Path(__file__).resolve().parent.parent
work = root / "target/vm"
VERSION = (root / "Cargo.toml").read_text().split('\nversion = "')[1].split('"')[0]
TOKEN = "token-of-a-machine"
# Seconds that a wait takes at most: nothing is asserted on time, as the emulation is slow.
MAX_WAIT = 300

SHELL_UNIT = "[Service]\nUser=admin\nWorkingDirectory=~\nEnvironment=LANG=C.UTF-8\nStandardInput=socket\nExecStart=/usr/local/bin/shell\n"
# Runs a script that ends with NUL.
SHELL = r"""#!/bin/bash
IFS= read -r -d '' script
bash -e -o pipefail -c "$script" </dev/null 2>&1
printf '\nexit %s' $?
"""
# What a machine does that has to start quickly: nothing but userd and its PostgreSQL, which gets the setting of the
# kernel's line (setting=fsync=off) before userd says that it listens to other machines.
QUICK = f"""#!/bin/sh
mount -o remount,rw / && mount -t tmpfs none /tmp
ip link set lo up && ip address add 10.0.2.15/24 dev eth0 && ip link set eth0 up && ip route add default via 10.0.2.2
if [ "$setting" ]; then
    /packages/userd --embedded=/var/lib/userd &
    until psql -q -h /var/lib/userd -U postgres -c "alter system set $setting"; do sleep 1; done
    kill $!
    wait $!
fi
HOST=0.0.0.0 API_TOKEN={TOKEN} /packages/userd --embedded=/var/lib/userd
echo "userd has ended: $?"
while :; do sleep 60; done
"""
FILES = {
    "etc/fstab": "/dev/vda / ext4 errors=remount-ro 0 1\n/dev/vdb /packages ext4 ro 0 0\n",
    "etc/hostname": "small\n",
    "etc/hosts": "127.0.0.1 localhost small\n::1 localhost\n",
    "etc/apt/sources.list": "deb [trusted=yes] file:/packages ./\n",
    "etc/apt/apt.conf.d/yes": 'APT::Get::Assume-Yes "true";\n',
    "etc/dpkg/dpkg.cfg.d/quick": "force-unsafe-io\n",
    "etc/sudoers.d/admin": "admin ALL=(ALL) NOPASSWD: ALL\n",
    "etc/systemd/network/eth0.network": "[Match]\nName=eth0\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\n",
    "etc/systemd/system/shell.socket": "[Socket]\nListenStream=22\nAccept=yes\n[Install]\nWantedBy=sockets.target\n",
    "etc/systemd/system/shell@.service": SHELL_UNIT,
    "usr/local/bin/shell": SHELL,
    "quick": "#!/bin/sh\nmount -o ro /dev/vdb /packages && exec /packages/quick\n",
}


class Failure(Exception):
    pass


def step(name):
    print(f"-- {time.strftime('%M:%S')} {name}", flush=True)


def wait(what, condition, patience=MAX_WAIT):
    """Waits until that is so. The condition raises Failure if it cannot become so."""
    end = time.monotonic() + patience
    while not (found := condition()):
        if time.monotonic() > end:
            raise Failure(f"waited for {patience} s: {what}")
        time.sleep(0.2)
    return found


def blocks(page, mark=""):
    """The blocks of code of a document that begin with this mark."""
    fences = [text.split("\n", 1) for text in (root / page).read_text().split("\n```")[1::2]]
    return [lines for first, lines in fences if first.startswith(mark)]


def block(page, part):
    """The block of code of a document that has this part."""
    found = [lines for lines in blocks(page) if part in lines]
    if not found:
        raise Failure(f"{page} has no block of code with {part!r}")
    return found[0]


def quietly(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode != 0:
        raise Failure(f"{command}\n{done.stdout}")


def image(tree, name):
    made = work / f"{name}.new"
    quietly("mke2fs", "-q", "-F", "-t", "ext4", "-d", tree, made, "3G")
    made.rename(work / name)


def index(packages):
    """Makes a directory with packages a source for apt."""
    facts = r"dpkg-deb -f $deb; stat --printf 'Filename: ./%n\nSize: %s\n' $deb; sha256sum $deb | sed 's/ .*/\n/; s/^/SHA256: /'"
    subprocess.run(["sh", "-ec", f"for deb in *.deb; do {facts}; done >Packages"], cwd=packages, check=True)


def make_system():
    """Makes the disks system.img, and postgresql.img, where PostgreSQL is installed, with the kernel and the packages."""
    if (work / "postgresql.img").exists():
        return
    step("the system's disk")
    shutil.rmtree(work, ignore_errors=True)
    tree, debs = work / "tree", work / "debs"
    debs.mkdir(parents=True)
    release = next(line for line in Path("/etc/os-release").read_text().splitlines() if line.startswith("VERSION_CODENAME="))
    sources = [path for path in ("/etc/apt/sources.list", "/etc/apt/sources.list.d/debian.sources") if os.path.exists(path)]
    download = f"""chroot "$1" sh -c 'apt-get clean; apt-get install -y -qq --download-only -o APT::Install-Recommends=true postgresql nginx'
        cp "$1"/var/cache/apt/archives/*.deb {debs}"""
    programs = "systemd-sysv,linux-image-cloud-amd64,udev,dbus,iproute2,procps,sudo,curl,adduser,libgcc-s1,ca-certificates"
    quietly("mmdebstrap", "--quiet", "--variant=apt", "--dpkgopt=force-unsafe-io", f"--include={programs}",
            f"--customize-hook={download}", release.split("=")[1], tree, *sources)
    inside = ["chroot", tree]
    for name in (tree / "etc/apt").glob("sources.list.d/*"):
        name.unlink()
    for name, text in FILES.items():
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(text)
        (tree / name).chmod(0o755 if text.startswith("#!") else 0o644)
    (tree / "packages").mkdir()
    quietly(*inside, "useradd", "--create-home", "--shell", "/bin/bash", "admin")
    quietly(*inside, "systemctl", "enable", "systemd-networkd", "shell.socket")
    for name in ("vmlinuz", "initrd.img"):
        shutil.copy(next((tree / "boot").glob(f"{name}-*")), work / name)
    shutil.copytree(debs, tree / "packages", dirs_exist_ok=True)
    index(tree / "packages")
    install = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-qq"]
    quietly(*inside, "apt-get", "update", "-qq")
    # The emulation would take minutes to unpack the libraries.
    names = {deb.name.split("_")[0] for deb in debs.iterdir()}
    quietly(*inside, *install, *(name for name in names if not name.startswith(("postgresql", "nginx"))))
    image(tree, "system.img")
    (tree / "etc/postgresql-common").mkdir(exist_ok=True)
    (tree / "etc/postgresql-common/createcluster.conf").write_text("create_main_cluster = false\n")
    quietly(*inside, *install, "postgresql")
    image(tree, "postgresql.img")
    shutil.rmtree(tree)


def make_packages(userd, only_userd=False):
    """Makes the second disk: userd, its package, the next version of that, and PostgreSQL's packages. A quick machine needs
    userd alone, on a disk of its own: .ci/vm and .ci/power run at the same time."""
    step("the packages' disk")
    name = "userd" if only_userd else "packages"
    tree = work / name
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir()
    # What a debugger reads would take most of the time to pack it.
    quietly("strip", "-o", tree / "userd", userd)
    (tree / "quick").write_text(QUICK)
    (tree / "quick").chmod(0o755)
    if not only_userd:
        environment = {"SOURCE_DATE_EPOCH": str(int(time.time())), **os.environ}
        quietly(root / "packaging/deb", tree / "userd", VERSION, tree, env=environment)
        quietly("sh", "-ec", f"""dpkg-deb -R userd_{VERSION}_*.deb ../next; sed -i 's/^Version: .*/&+next/' ../next/DEBIAN/control
            dpkg-deb -Zgzip -z1 --root-owner-group -b ../next userd_{VERSION}+next_amd64.deb; rm -r ../next""", cwd=tree)
        shutil.copytree(work / "debs", tree, dirs_exist_ok=True)
        index(tree)
    image(tree, f"{name}.img")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Machine:
    """A machine with a copy of that disk. What it has said is shown if the block of `with` fails."""

    def __init__(self, disk):
        self.dir = Path(tempfile.mkdtemp(prefix="userd-machine-"))
        self.disk, self.console = self.dir / "disk", self.dir / "console"
        subprocess.run(["cp", "--sparse=always", work / disk, self.disk], check=True)
        self.shell, self.port = free_port(), free_port()
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if error and self.processes:
            print("== console\n", self.console.read_text(errors="replace")[-5000:], sep="")
            with contextlib.suppress(Exception):
                print("== journal\n", self.run("sudo journalctl -b --no-pager -n 100; systemctl --failed --no-pager", timeout=60), sep="")
        self.cut()
        shutil.rmtree(self.dir)

    def start(self, *more, quick=False, setting=""):
        """Switches it on. quick: with nothing but userd and its PostgreSQL, which may get a setting."""
        server = self.dir / "nbd"
        server.unlink(missing_ok=True)
        disk = ["nbdkit", "--foreground", "--unix", server, "--filter=cache", "file", self.disk, "cache=writeback", "cache-min-block-size=4096"]
        self.processes = [subprocess.Popen(disk)]
        wait("nbdkit listens", server.exists)
        ports = f"hostfwd=tcp:127.0.0.1:{self.shell}-:22,hostfwd=tcp:127.0.0.1:{self.port}-:3000"
        line = "root=/dev/vda console=ttyS0 quiet net.ifnames=0 panic=-1 " + ("init=/quick setting=" + setting if quick else "")
        qemu = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", "256", "-smp", "1", "-display", "none",
                "-chardev", f"file,id=console,path={self.console},append=on", "-serial", "chardev:console",
                "-kernel", work / "vmlinuz", "-initrd", work / "initrd.img", "-append", line,
                "-drive", f"file=nbd:unix:{server},if=virtio,format=raw,cache=none",
                "-drive", f"file={work / ('userd.img' if quick else 'packages.img')},if=virtio,format=raw,readonly=on",
                "-nic", f"user,model=virtio-net-pci,restrict=on,{ports}", *more]
        self.processes.append(subprocess.Popen(qemu, stdin=subprocess.DEVNULL))

    def boot(self, *more):
        self.start(*more)
        self.wait_for_shell()

    def wait_for_shell(self):
        wait("the machine is up", lambda: self.call("systemctl is-system-running --wait", 60) is not None)

    def check(self):
        """Fails if it is down."""
        for process in self.processes:
            if process.poll() is not None:
                raise Failure(f"{process.args[0]} has ended: {process.returncode}")

    def cut(self):
        """Cuts the power."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.processes = []

    def off(self):
        self.call("sudo systemctl poweroff --no-block")
        self.processes.pop().wait(MAX_WAIT)
        self.processes.pop().terminate()

    def call(self, script, timeout=MAX_WAIT):
        """Runs a script. Returns its output, with `exit CODE` as the last line; nothing if the machine does not answer."""
        self.check()
        said = b""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.shell), timeout) as connection:
            connection.sendall(script.encode() + b"\0")
            while part := connection.recv(65536):
                said += part
        return said.decode(errors="replace") if b"\nexit " in said[-20:] else None

    def run(self, script, timeout=MAX_WAIT):
        """Runs the lines of a script, each of which must succeed. Returns what they print."""
        said = self.call(script, timeout)
        output, code = (said or "\n").rsplit("\n", 1)
        if code != "exit 0":
            raise Failure(f"{script}\n{output}\n{code or 'no answer'}")
        return output

    def reboot(self):
        boot = "cat /proc/sys/kernel/random/boot_id"
        before = self.call(boot)
        self.call("sudo systemctl reboot --no-block")
        wait("it boots", lambda: self.call(boot, 10) not in (before, None))
        self.wait_for_shell()

    def wait_for_unit(self, unit, may_restart=False):
        """Waits until a unit is up, or fails if it has."""
        def is_up():
            state = self.run(f"systemctl show -P ActiveState -P SubState {unit}")
            if not may_restart and ("failed" in state or "auto-restart" in state):
                raise Failure(self.run(f"systemctl status {unit}; true"))
            return state.startswith("active")
        wait(f"{unit} is up", is_up)

    def client(self):
        return Client(self.port)

    def wait_for_userd(self, unit=None):
        """Waits until it serves, or fails if its unit has."""
        if unit:
            self.wait_for_unit(unit)
        def serves():
            self.check()
            return self.client().call("GET", "/readyz").status == 200
        wait("userd serves", serves)


class Answer:
    def __init__(self, status=0, headers=(), body=b""):
        self.status, self.headers = status, dict(headers)
        self.body = json.loads(body) if body else None


class Client:
    """A connection to userd. An answer of status 0 is none."""

    def __init__(self, port):
        self.connection = HTTPConnection("127.0.0.1", port, timeout=60)

    def call(self, method, path, body=None, **headers):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            self.connection.request(method, path, body and json.dumps(body), {"Authorization": f"Bearer {TOKEN}", **headers})
            answer = self.connection.getresponse()
            return Answer(answer.status, answer.getheaders(), answer.read())
        except (OSError, HTTPException):
            self.connection.close()
            return Answer()


def users_of(port):
    """Walks over all users. Returns each by its id."""
    client, found, after = Client(port), {}, 0
    while page := client.call("GET", f"/users?after={after}&perPage=1000").body["data"]:
        found.update((user["id"], user) for user in page)
        after = page[-1]["id"]
    return found


class Writers:
    """Clients outside of a machine that create, change and delete users, and note what was acknowledged."""

    def __init__(self, port, users=(), count=6):
        self.port, self.acknowledged, self.unexpected, self.stopped = port, 0, [], False
        # All users as they were answered last, those that are deleted, the first answer to each key, and the subjects of
        # changes that had no answer: ids, or the addresses of creates.
        self.users, self.deleted, self.keys, self.in_flight = dict(users), set(), {}, set()
        self.threads = [threading.Thread(target=self.write, args=[f"{time.time()}-{n}"], daemon=True) for n in range(count)]
        for thread in self.threads:
            thread.start()

    def write(self, name):
        client = Client(self.port)
        for n in itertools.count():
            if self.stopped:
                return
            address = f"{name}-{n}@example.com"
            created = self.send(client, address, "POST", "/users", {"name": address, "email": address}, Idempotency_Key=address)
            if not created:
                continue
            user = created["id"]
            self.users[user] = self.keys[address] = created
            if n % 2 and (changed := self.send(client, user, "PUT", f"/users/{user}", {"name": f"changed {n}"})):
                self.users[user] = changed
            if n % 4 == 3 and user in self.users and self.send(client, user, "DELETE", f"/users/{user}"):
                del self.users[user], self.keys[address]
                self.deleted.add(user)

    def send(self, client, subject, method, path, body=None, **headers):
        """Returns the body of an acknowledged change."""
        answer = client.call(method, path, body, **headers)
        if answer.status in (200, 201, 204):
            self.acknowledged += 1
            return answer.body or True
        if answer.status not in (0, 503):
            self.unexpected.append(f"{method} {path}: {answer.status} {answer.body}")
        self.in_flight.add(subject)
        self.users.pop(subject, None)
        time.sleep(0.2)
        return None

    def stop(self):
        self.stopped = True
        for thread in self.threads:
            thread.join()
        if self.unexpected:
            raise Failure("\n".join(self.unexpected[:10]))

    def lost(self):
        """Reads everything back. Returns the users whose acknowledged state is not there, and all that are there."""
        client, found = Client(self.port), users_of(self.port)
        lost = [user for user, body in self.users.items() if found.get(user) != body] + [user for user in self.deleted if user in found]
        known = self.users.keys() | self.deleted | self.in_flight
        strangers = [user for user in found.values() if user["id"] not in known and user["email"] not in known]
        total = client.call("GET", "/users?perPage=1").body["total"]
        if strangers or total != len(found):
            raise Failure(f"{len(found)} users, the total is {total}; made by none: {strangers[:5]}")
        print(f"   {self.acknowledged} acknowledged, {len(self.in_flight)} in flight, {len(lost)} lost", flush=True)
        # A delete in flight may have been done: then its user's key is gone, too.
        kept = [(address, created) for address, created in self.keys.items() if created["id"] not in self.in_flight]
        for address, created in [] if lost else kept[-20:]:
            again = client.call("POST", "/users", {"name": address, "email": address}, Idempotency_Key=address)
            if (again.status, again.body, again.headers.get("Idempotency-Replayed")) != (201, created, "true"):
                raise Failure(f"a key answers otherwise: {created}, {again.status} {again.body}")
        return lost, found


def needs(*programs):
    """Ends the process if the emulator is missing: with CI set that is an error."""
    missing = [program for program in programs if not shutil.which(program)]
    if missing or os.getuid() != 0:
        print(f"not tried: it takes root and {', '.join(missing or programs)}")
        sys.exit(1 if os.environ.get("CI") else 0)


if __name__ == "__main__":
    make_system()
