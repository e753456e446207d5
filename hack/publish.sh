#!/usr/bin/env bash
# Publishes the files that make release left in a folder: the image and the chart in their registries, all
# files with the notes of CHANGELOG.md on GitHub. hack/release/where says where.
# hack/publish.sh FOLDER VERSION
# It needs skopeo, helm and gh, logged in. It can be run again after a failure: GitHub's release,
# which people see, comes last.
set -euo pipefail
[ $# -eq 2 ] || { echo 'usage: hack/publish.sh FOLDER VERSION' >&2; exit 2; }
folder=$(realpath "$1") version=$2
cd "$(dirname "$0")/.."
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { echo "publish: $version is no release" >&2; exit 1; }
image=$(hack/where.sh image) charts=$(hack/where.sh charts) repository=$(hack/where.sh repository)
(cd "$folder" && sha256sum --check --quiet SHA256SUMS)

notes=$(mktemp)
trap 'rm -f "$notes"' EXIT
awk -v section="## [$version]" '/^## \[/ { in_it = index($0, section) == 1; next } in_it' CHANGELOG.md >"$notes"
grep -q '[^[:space:]]' "$notes" || { echo "publish: CHANGELOG.md has no section $version" >&2; exit 1; }

# Manifests and chart name the digest, so that the registry must keep it.
archive=oci-archive:$folder/canaryd_${version}_image.tar
skopeo copy --all --preserve-digests "$archive" "docker://$image:$version"
pushed=$(skopeo inspect --raw "docker://$image:$version" | sha256sum | cut -d' ' -f1)
tar -xzOf "$folder/canaryd_${version}_manifests.tar.gz" --wildcards '*/kubernetes/base/*.yaml' | grep -qF "$image@sha256:$pushed" || {
	echo "publish: the manifests do not name $image@sha256:$pushed" >&2
	exit 1
}
helm push "$folder/canaryd-$version.tgz" "oci://$charts"

# A draft is one whose files did not all arrive.
files=("$folder"/*)
[ "$(gh release view "v$version" --repo "$repository" --json isDraft --jq .isDraft 2>/dev/null)" = false ] ||
	gh release create "v$version" --repo "$repository" --verify-tag --title "canaryd $version" --notes-file "$notes" "${files[@]}"
# A later step attests the image by it.
[ -z "${GITHUB_OUTPUT:-}" ] || printf 'image=%s\ndigest=sha256:%s\n' "$image" "$pushed" >>"$GITHUB_OUTPUT"
