#!/usr/bin/env bash
# Prints or changes where canaryd is published, which hack/release/where says:
# hack/where.sh NAME          prints the name's value
# hack/where.sh NAME VALUE    changes it there, and in all files of the checkout that have the old value
# A Go module keeps its path: only https://github.com/... is an address.
set -euo pipefail
[ $# -eq 1 ] || [ $# -eq 2 ] || { echo 'usage: hack/where.sh NAME [VALUE]' >&2; exit 2; }
cd "$(dirname "$0")/.."
old=$(sed -n "s/^$1 //p" hack/release/where)
[ -n "$old" ] || { echo "where: hack/release/where has no line \"$1\": it has $(grep -o '^[a-z]*' hack/release/where | xargs)" >&2; exit 1; }
[ $# -eq 2 ] || { echo "$old"; exit; }
new=$2
[[ $new =~ ^[A-Za-z0-9@:/._-]+$ ]] || { echo "where: \"$new\" is no address" >&2; exit 1; }
# A value may begin another one, such as that of an image a chart's: so the lines are changed alone.
sed -i "s|^$1 .*|$1 $new|" hack/release/where
{ git grep -lF -e "$old" -- ':!hack/release/where' ':!*/testdata/*' ':!CHANGELOG.md' || true; } | while read -r file; do
	sed -i "s|${old//./\\.}|$new|g" "$file"
done
