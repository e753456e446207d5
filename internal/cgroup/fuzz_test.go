package cgroup

import "testing"

// FuzzMemoryLimit: for any content of the kernel's files, a limit is read from one of them, and
// is never negative.
func FuzzMemoryLimit(f *testing.F) {
	const file = "sys/fs/cgroup/system.slice/canaryd.service/memory.max"
	f.Add("0::/system.slice/canaryd.service\n", mountV2, file, "469762048\n")
	f.Add(groupsV1, mountV1, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
	f.Add("0::/../x\n", "30 23 0:26 /.. /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n", "sys/fs/cgroup/memory.max", "-1")
	f.Add("0::/a\n", `30 23 0:26 /\0401 /../\134 ro - cgroup2 cgroup2 rw`, "a/b", "18446744073709551616")
	f.Fuzz(func(t *testing.T, groups, mounts, name, text string) {
		limit, _ := MemoryLimit(tree{"proc/self/cgroup": groups, "proc/self/mountinfo": mounts, name: text})
		if limit.Bytes < 0 || limit.Bytes >= unlimited || limit.HeapLimit() < least {
			t.Errorf("%+v, of which the heap may have %d", limit, limit.HeapLimit())
		}
		if (limit.Bytes > 0) != (limit.File != "") || limit.File != "" && limit.File != "/"+name {
			t.Errorf("%+v, and the only file is %q", limit, name)
		}
	})
}
