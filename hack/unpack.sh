# shellcheck shell=bash
# Unpacks packages of any of Debian's suites and architectures next to the system; other scripts
# source it. Nothing is installed: apt gets folders of its own below $work, which whoever
# sources this removes.

keys=/usr/share/keyrings/debian-archive-keyring.gpg

# what_lacks says why packages cannot be unpacked here, or nothing.
what_lacks() {
	local program
	[ "$(id -u)" -eq 0 ] || { echo "only root unpacks Debian's packages." && return; }
	for program in apt-get dpkg-deb; do
		command -v $program >/dev/null || { echo "there is no $program here." && return; }
	done
	[ -e $keys ] || echo "$keys is not here: install debian-archive-keyring."
}

# The mirror is the one that this machine uses, if it uses one of Debian's.
mirror() {
	local own
	own=$(apt-get indextargets --format '$(ORIGIN) $(REPO_URI)' 'Created-By: Packages' 2>/dev/null |
		sed -n 's/^Debian \(.*[^/]\)\/*$/\1/p' | grep '/debian$' | head -n 1) || true
	echo "${own:-http://deb.debian.org/debian}"
}

# suite makes folders for apt in $work/SUITE-ARCHITECTURE, and reads the suite's lists.
# After it apt_of runs one of apt's programs with them.
suite() { # SUITE ARCHITECTURE
	suite_folder=$work/$1-$2
	mkdir -p "$suite_folder"/{lists/partial,cache/archives/partial}
	: >"$suite_folder/status"
	echo "deb [arch=$2 signed-by=$keys] $(mirror) $1 main" >"$suite_folder/sources"
	cat >"$suite_folder/apt.conf" <<-END
		APT::Architecture "$2";
		APT::Architectures "$2";
		APT::Sandbox::User "root";
		APT::Install-Recommends "0";
		APT::Get::Assume-Yes "1";
		quiet "1";
		Acquire::Languages "none";
		Dir::Etc::sourcelist "$suite_folder/sources";
		Dir::Etc::sourceparts "/dev/null";
		Dir::State::lists "$suite_folder/lists";
		Dir::State::status "$suite_folder/status";
		Dir::Cache "$suite_folder/cache";
		Debug::NoLocking "1";
	END
	apt_of get update
}

apt_of() { # PROGRAM ARGUMENTS...
	local program=apt-$1
	shift
	APT_CONFIG=$suite_folder/apt.conf "$program" "$@"
}

# unpack_with unpacks packages and all that they need below a folder of that suite's.
unpack_with() { # ROOT PACKAGE...
	local root=$1 package
	shift
	apt_of get --download-only install "$@" || return
	# Old packages have files in /bin and /lib, where the system has links into /usr.
	mkdir -p "$root"/usr/{bin,sbin,lib,lib64}
	for package in bin sbin lib lib64; do ln -sfn usr/$package "$root/$package" || return; done
	for package in "$suite_folder"/cache/archives/*.deb; do
		dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$root" || return
	done
}

# unpack_alone unpacks packages, and nothing that they need.
unpack_alone() { # ROOT PACKAGE...
	local root=$1 package
	shift
	mkdir -p "$root" "$suite_folder/alone"
	(cd "$suite_folder/alone" && apt_of get download "$@") || return
	for package in "$suite_folder"/alone/*.deb; do
		dpkg-deb --fsys-tarfile "$package" | tar -x --keep-directory-symlink -C "$root" || return
	done
}
