"""The walls of the Linux kernel around untrusted code, which hold even if that code takes over its interpreter.

The child process of run.py applies this to itself before the code runs. Standard library only.
"""

import ctypes
import os
import signal
import struct
import sys

PARTS = ("namespaces", "Landlock", "seccomp")
END_WITH_PARENT, NO_NEW_PRIVILEGES = 1, 38                          # of prctl
FILTER = 22
NEW_MOUNTS, NEW_IPC = 0x20000, 0x08000000                           # of unshare
NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
PRIVATE, RESTRICTED = 0x4000 | 0x40000, 2 | 4 | 8                   # of mount: no setuid, no devices, no programs
READ_ONLY, RECURSIVE = 1, 0x8000                                    # of mount_setattr
HERE = -100
MOUNT_SETATTR, CREATE_RULESET = 442, 444                            # numbers, the same on all architectures
ADD_RULE, RESTRICT_SELF = 445, 446
CAPABILITIES_3 = 0x20080522
FOLDER_BYTES = 16 << 20                                             # the most that the working folder may hold
FILES = 1000                                                        # files and folders there
# Landlock's rights by the version in which they came: of files 13, moves, truncating, none, ioctl of devices
RIGHTS = (13, 14, 15, 15, 16)
WRITE_FILE, READ_FILE = 1 << 1, 1 << 2
READ_FOLDER = 1 << 3
# Write, read, list, remove folders and files, make folders, files and links, move, truncate. Not: programs, devices,
# pipes, sockets
INSIDE = WRITE_FILE | READ_FILE | READ_FOLDER | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 13 | 1 << 14
LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo",
             "/dev/urandom")


def end_with(parent):
    """The kernel ends this process when its parent ends, whose process id is `parent`."""
    call("prctl", END_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def enter_namespaces():
    """Gives the process a network without connections, and a view of all files that is read-only except for the working
    folder, which is in memory and holds at most FOLDER_BYTES."""
    user, group = os.getuid(), os.getgid()
    call("unshare", NEW_USER | NEW_MOUNTS | NEW_NETWORK | NEW_IPC)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(line)
    call("mount", b"none", b"/", None, PRIVATE, None)
    attributes = struct.pack("=4Q", READ_ONLY, 0, 0, 0)
    call("syscall", MOUNT_SETATTR, HERE, b"/", RECURSIVE, attributes, len(attributes))
    folder = os.getcwd()
    limits = f"size={FOLDER_BYTES},nr_inodes={FILES}"
    call("mount", b"tmpfs", os.fsencode(folder), b"tmpfs", RESTRICTED, limits.encode())
    os.chdir(folder)


def drop_privileges():
    """Takes from root every power that other users do not have; no program that is started can gain one."""
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    call("capset", struct.pack("=Ii", CAPABILITIES_3, 0), struct.pack("=6I", *[0] * 6))


def restrict_files():
    """Landlock: files outside the working folder cannot be opened, except the standard library's for reading."""
    version = call("syscall", CREATE_RULESET, None, 0, 1)
    files = (1 << RIGHTS[min(version, len(RIGHTS)) - 1]) - 1
    rules = [files]
    if version >= 4:
        rules.append(3)  # bind and connect
    if version >= 6:
        rules.append(3)  # signals and abstract sockets
    rules = struct.pack(f"={len(rules)}Q", *rules)
    ruleset = call("syscall", CREATE_RULESET, rules, len(rules), 0)
    allowed = dict.fromkeys([*sys.path, os.path.join(sys.base_prefix, "lib"), *LIBRARIES], READ_FILE | READ_FOLDER)
    allowed |= {".": INSIDE, os.devnull: READ_FILE | WRITE_FILE}
    for path, rights in allowed.items():
        if os.path.exists(path):
            rights &= files if os.path.isdir(path) else READ_FILE | WRITE_FILE
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
            call("syscall", ADD_RULE, ruleset, 1, struct.pack("=Qi", rights, place), 0)
            os.close(place)
    call("syscall", RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def restrict_calls(lines):
    """seccomp: the kernel runs a filter program at every system call."""
    kept = ctypes.create_string_buffer(lines)  # the kernel reads it during the call
    call("prctl", FILTER, 2, struct.pack("@HP", len(lines) // 8, ctypes.addressof(kept)), 0, 0)


def protect(parts, parent, filter_program):
    """Applies what every Linux has, and the parts of PARTS that are named. Raises OSError if the kernel refuses one.

    parent: the process that this one ends with; filter_program: the function of syscalls.py
    """
    if "namespaces" in parts:
        enter_namespaces()
    drop_privileges()
    end_with(parent)  # after what changes credentials: that could undo it
    if "Landlock" in parts:
        restrict_files()
    if "seccomp" in parts:  # last, because it refuses what the others need
        restrict_calls(filter_program("namespaces" in parts))


def call(name, *arguments):
    """Calls a function of the C library. Raises OSError if it fails."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    result = function(*(ctypes.c_long(x) if isinstance(x, int) else x for x in arguments))
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), f"{name} {arguments[0]}" if name == "syscall" else name)
    return result
