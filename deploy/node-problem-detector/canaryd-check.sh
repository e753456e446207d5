#!/bin/bash
# Asks a canaryd over HTTP what "canaryd check -o line" asks over its socket, for a
# node-problem-detector whose image has no canaryd. bash is all that it needs.
# canaryd-check.sh [HOST:PORT]: one line; exit code 0 in force, 1 lost, 2 unknown.
address=${1:-${CANARYD_ADDRESS:-127.0.0.1:9475}}
host=${address%:*} port=${address##*:}
host=${host#[} host=${host%]} # [::1]:9475

unknown() {
	echo "unknown: $*"
	exit 2
}

# get PATH reads the answer's lines into the array answer, and fails unless it is a 200.
get() {
	answer=()
	{
		printf 'GET %s HTTP/1.0\r\n\r\n' "$1" >&3 && mapfile -t answer <&3
	} 3<>"/dev/tcp/$host/$port" || return
	[[ ${answer[0]} == HTTP/1.?\ 200* ]]
} 2>/dev/null

# look sets lost and unread, lists of tables, and since, by canaryd's status.
look() {
	local line family='' table verdict within=false
	get /healthz || unknown "no canaryd that works answers at $address"
	get /api/v1/status || unknown "canaryd at $address tells no status"
	lost=() unread=() since='' tables=0
	for line in "${answer[@]}"; do
		case $line in
		'  "stopped": true'*) unknown 'a cleanup removed the marks; restart canaryd' ;;
		'  "lossSince": '*) since=${line#*: } ;;
		'  "families": {') within=true ;;
		'  }'*) within=false ;;
		'    "'*'": {') family=${line#*\"} family=${family%%\"*} ;;
		'      "'*'": "'*)
			$within || continue
			table=${line#*\"} verdict=${line#*: \"}
			table="$family ${table%%\"*}" verdict=${verdict%%\"*}
			tables=$((tables + 1))
			case $verdict in
			intact | changed) ;;
			unknown) unread+=("$table") ;;
			*) lost+=("$table $verdict") ;;
			esac
			;;
		esac
	done
}

# list prints as many of its arguments as a line of 80 bytes has room for.
list() {
	local text='' left=$# item
	for item; do
		if [ -n "$text" ] && [ $((${#text} + ${#item})) -gt 58 ]; then
			echo "$text and $left more"
			return
		fi
		text+=${text:+, }$item left=$((left - 1))
	done
	echo "$text"
}

look
if [ ${#lost[@]} -gt 0 ] || [ -n "$since" ]; then
	sleep 2 # canaryd heals faster than that
	look
fi
if [ ${#lost[@]} -gt 0 ]; then
	echo "lost: $(list "${lost[@]}")"
	exit 1
elif [ -n "$since" ]; then
	echo "lost: rules have been missing since ${since//[\",]/}"
	exit 1
elif [ ${#unread[@]} -gt 0 ]; then
	unknown "$(list "${unread[@]}")"
elif [ "$tables" -eq 0 ]; then
	unknown 'no table has been looked at yet'
fi
echo "whole: $tables tables are intact"
