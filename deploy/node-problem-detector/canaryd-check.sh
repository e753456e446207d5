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

# judge TABLE VERDICT sorts a table by its verdict.
judge() {
	tables=$((tables + 1))
	case $2 in
	intact | changed) ;;
	refused) refused+=("$1") ;;
	unknown | '') unread+=("$1") ;;
	*) lost+=("$1 $2") ;;
	esac
}

# look sets lost, refused and unread, lists of tables, and since, by canaryd's status.
look() {
	local line family='' name text within='' natives=0 nativeError=''
	get /healthz || unknown "no canaryd that works answers at $address"
	get /api/v1/status || unknown "canaryd at $address has no status"
	lost=() refused=() unread=() since='' tables=0
	for line in "${answer[@]}"; do
		case $line in
		'  "stopped": true'*) unknown 'a cleanup removed the marks; restart canaryd' ;;
		'  "lossSince": '*) since=${line#*: } ;;
		'  "nativeError": '*) nativeError=yes ;; # they cannot be read
		'  "families": {') within=families ;;
		'  "native": [') within=native ;;
		'  }'* | '  ]'*) within='' ;;
		'    "'*'": {') family=${line#*\"} family=${family%%\"*} ;;
		'      "'*'": "'*)
			name=${line#*\"} text=${line#*: \"}
			name=${name%%\"*} text=${text%%\"*}
			case $within/$name in
			families/*) judge "$family $name" "$text" ;;
			native/table) family=$text natives=$((natives + 1)) ;; # such as "ip kube-proxy"
			native/verdict) judge "$family" "$text" ;;
			esac
			;;
		esac
	done
	[ -z "$nativeError" ] || [ $natives -gt 0 ] || judge 'native tables' unknown
}

# list prints a word and as many of the tables as a line of 80 bytes has room for.
list() {
	local line=$1 left=$(($# - 1)) item
	shift
	for item; do
		if [ "$left" -lt $# ] && [ $((${#line} + ${#item} + 13)) -gt 80 ]; then # 13: ", " and " and N more"
			echo "$line and $left more"
			return
		fi
		[ "$left" -eq $# ] || line+=,
		line+=" $item" left=$((left - 1))
	done
	echo "$line"
}

look
if [ ${#lost[@]} -gt 0 ] || [ -n "$since" ]; then
	sleep 2 # canaryd heals faster than that
	look
fi
if [ ${#lost[@]} -gt 0 ]; then
	list lost: "${lost[@]}"
	exit 1
elif [ -n "$since" ]; then
	echo "lost: rules have been missing since ${since//[\",]/}"
	exit 1
elif [ ${#refused[@]} -gt 0 ]; then
	list 'declared rules refused:' "${refused[@]}"
	exit 1
elif [ ${#unread[@]} -gt 0 ]; then
	list unknown: "${unread[@]}"
	exit 2
elif [ "$tables" -eq 0 ]; then
	unknown 'no table has been looked at yet'
fi
echo "intact: $tables tables"
