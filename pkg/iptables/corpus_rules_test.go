package iptables_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"github.com/canaryd/canaryd/pkg/rules"
)

// corpus has each option of each match and target of iptables 1.8.9 to 1.8.11.
// Options are inverted if possible, at their bounds, and with numbers that look
// like text. A line is the arguments of rules:
//
//	?!      with "!" and without
//	(a|b)   each of these
//	{u32}   a random value, see corpusValues
//
// A line begins with "4" or "6" if it is for one family, and with "-t TABLE" if
// not for filter. The test leaves out rules that this machine's iptables or
// kernel refuses.
const corpus = `
# Options that belong to no extension.
?! -s ({ip}|{net}) -j ACCEPT
4 ?! -d (0.0.0.0|255.255.255.255|{ip}/(8|25|31)|10.0.3.0/255.0.255.0) -j ACCEPT
6 ?! -d (::|::/0|ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff|{ip}/(1|64|127)|1::2/ffff::ffff) -j ACCEPT
?! -i (eth0|eth+|+|a|{device}) -j ACCEPT
?! -o (eth0|eth+|+|fifteen-letters|{device}) -j ACCEPT
?! -p (1|tcp|esp|255|{u8}) -j ACCEPT
-p (0|all) -j ACCEPT
4 ?! -f -j ACCEPT
?! -s {net} ?! -d {net} ?! -i {device} ?! -o {device} ?! -p tcp -j (ACCEPT|DROP|RETURN)
-p tcp -g GOAL
-p udp -j GOAL

-m addrtype ?! --src-type (UNICAST|LOCAL|ANYCAST|MULTICAST|UNREACHABLE) -j ACCEPT
4 -m addrtype ?! --src-type (UNSPEC|BROADCAST|BLACKHOLE|PROHIBIT|THROW|NAT|XRESOLVE) -j ACCEPT
-m addrtype ?! --dst-type (LOCAL,MULTICAST|UNICAST,LOCAL,ANYCAST,MULTICAST,UNREACHABLE) -j ACCEPT
-m addrtype ?! --src-type LOCAL ?! --dst-type UNICAST (|--limit-iface-in|--limit-iface-out) -j ACCEPT

-p ah -m ah ?! --ahspi (0|4294967295|0:|:0|:|0:4294967295|1:4294967295|4294967295:|{u32}|{lo32}:{hi32}) -j ACCEPT
-p ah -m ah -j ACCEPT
6 -m ah ?! --ahlen (0|4294967295|{u32}) -j ACCEPT
6 -m ah ?! --ahspi {u32} ?! --ahlen {u32} --ahres -j ACCEPT

-m bpf --bytecode "4,48 0 0 9,21 0 1 6,6 0 0 1,6 0 0 0" -j ACCEPT
-m bpf --bytecode "(1,6 0 0 0|1,6 0 0 4294967295|2,40 0 0 {u16},6 0 0 {u32}|3,0 0 0 {u32},4 0 0 {u32},6 0 0 {u32})" -j ACCEPT

-m cgroup ?! --cgroup (0|4294967295|{u32}) -j ACCEPT
-m cgroup ?! --path "/" -j ACCEPT

-m cluster --cluster-total-nodes (2|32) ?! --cluster-local-node (1|2) --cluster-hash-seed (0|4294967295|{u32}) -j ACCEPT
-m cluster --cluster-total-nodes 16 ?! --cluster-local-nodemask (1|0x7f|{u8}) --cluster-hash-seed {x32} -j ACCEPT

-m comment --comment ("!"|"-h"|"--set"|"it is"|"a\\b"|"\"x\""|'|{text}) -j ACCEPT
-p tcp -m comment --comment {text} -m tcp --dport 80 -m comment --comment {text} -j ACCEPT

-m connbytes ?! --connbytes (0|0:|1:1|:18446744073709551615|18446744073709551615|{u64}|{lo64}:{hi64}) --connbytes-mode (packets|bytes|avgpkt) --connbytes-dir (original|reply|both) -j ACCEPT

-m connlabel ?! --label (0|41|127|{u8}) (|--set) -j ACCEPT

-m connlimit (--connlimit-upto|--connlimit-above) (0|1|4294967295|{u32}) (|--connlimit-daddr) -j ACCEPT
-m connlimit --connlimit-above {u32} --connlimit-mask (0|1|24|32) (--connlimit-saddr|--connlimit-daddr) -j ACCEPT
6 -m connlimit --connlimit-upto {u32} --connlimit-mask (0|64|65|128) -j ACCEPT

-m connmark ?! --mark (0|0/0|0xffffffff|0/0xffffffff|{x32}|{x32}/{x32}|1/2) -j ACCEPT
-m mark ?! --mark (0|0/0|0xffffffff|0/0xffffffff|{x32}|{x32}/{x32}|1/2) -j ACCEPT

-m conntrack ?! --ctstate (INVALID|NEW|RELATED|ESTABLISHED|UNTRACKED|SNAT|DNAT|RELATED,ESTABLISHED|INVALID,NEW,RELATED,ESTABLISHED,UNTRACKED,SNAT,DNAT) -j ACCEPT
-m conntrack ?! --ctstatus (NONE|EXPECTED|SEEN_REPLY|ASSURED|CONFIRMED|EXPECTED,SEEN_REPLY,ASSURED,CONFIRMED) -j ACCEPT
-m conntrack ?! --ctproto (1|tcp|17|255|{u8}) -j ACCEPT
-m conntrack ?! (--ctorigsrc|--ctorigdst|--ctreplsrc|--ctrepldst) ({ip}|{net}) -j ACCEPT
-m conntrack --ctproto tcp ?! (--ctorigsrcport|--ctorigdstport|--ctreplsrcport|--ctrepldstport) (0|65535|0:65535|{u16}|{lo16}:{hi16}) -j ACCEPT
-m conntrack ?! --ctexpire (0|4294967295|0:4294967295|{u32}|{lo32}:{hi32}) -j ACCEPT
-m conntrack --ctdir (ORIGINAL|REPLY) -j ACCEPT
-m conntrack --ctstate NEW ?! --ctstatus ASSURED ?! --ctproto udp ?! --ctorigsrc {net} --ctorigdstport {u16} --ctexpire {u32} --ctdir REPLY -j ACCEPT
-m state ?! --state (INVALID|NEW|RELATED,ESTABLISHED|UNTRACKED) -j ACCEPT

-m cpu ?! --cpu (0|1|4294967295|{u32}) -j ACCEPT

-p dccp -m dccp ?! --sport (0|65535|0:65535|{lo16}:{hi16}) -j ACCEPT
-p dccp -m dccp ?! --source-port {u16} ?! --destination-port {u16} ?! --dccp-types (REQUEST|RESPONSE,DATA|REQUEST,RESPONSE,DATA,ACK,DATAACK,CLOSEREQ,CLOSE,RESET,SYNC,SYNCACK,INVALID) -j ACCEPT
-p dccp -m dccp ?! --dport {u16} ?! --dccp-option (1|255|{u8}) -j ACCEPT

-m devgroup ?! --src-group (0|4294967295|0/0|{u32}|{x32}/{x32}) -j ACCEPT
-m devgroup ?! --dst-group (0|0xffffffff|0x1/0x3|{u32}|{x32}/{x32}) -j ACCEPT
-m devgroup ?! --src-group {u32} ?! --dst-group {x32}/{x32} -j ACCEPT

-m dscp ?! --dscp (0|0x3f|{u5}) -j ACCEPT
-m dscp ?! --dscp-class (BE|EF|CS1|CS7|AF11|AF43) -j ACCEPT

6 -m dst ?! --dst-len (0|255|65535|{u8}) (|--dst-opts 149:92,12:12,123:12|--dst-opts {u8}:{u8},{u8}) -j ACCEPT
6 -m dst --dst-opts {u8},{u8}:{u8},0 -j ACCEPT

-p tcp -m ecn ?! --ecn-tcp-cwr ?! --ecn-tcp-ece -j ACCEPT
-m ecn ?! --ecn-ip-ect (0|1|2|3) -j ACCEPT
-p tcp -m ecn ?! --ecn-tcp-ece ?! --ecn-ip-ect 2 -j ACCEPT

-p esp -m esp ?! --espspi (0|4294967295|0:|:0|:|0:4294967295|1:4294967295|4294967295:|{u32}|{lo32}:{hi32}) -j ACCEPT
-p esp -m esp -j ACCEPT

6 -m eui64 -j ACCEPT

6 -m frag ?! --fragid (0|4294967295|0:|:|0:4294967295|{u32}|{lo32}:{hi32}) -j ACCEPT
6 -m frag ?! --fraglen (0|4294967295|{u32}) -j ACCEPT
6 -m frag ?! --fragid {u32} ?! --fraglen {u32} --fragres --fragfirst (|--fragmore|--fraglast) -j ACCEPT
6 -m frag -j ACCEPT

-m hashlimit (--hashlimit-upto|--hashlimit-above) (1/sec|10000/sec|1/min|1/hour|1/day|3/day|1000000/sec|9/min) --hashlimit-burst (1|5|10000) --hashlimit-mode (srcip|dstip,srcport|srcip,srcport,dstip,dstport) --hashlimit-name {word} -j ACCEPT
-m hashlimit (--hashlimit-upto|--hashlimit-above) (1b/s|16b/s|512kb/s|1mb/s|{u24}b/s) --hashlimit-mode srcip --hashlimit-name {word} -j ACCEPT
-m hashlimit --hashlimit-above (512kb/s|1mb/s) --hashlimit-burst (1mb|2mb|{u24}b) --hashlimit-name {word} -j ACCEPT
-m hashlimit --hashlimit-upto 1/sec --hashlimit-mode srcip,dstip --hashlimit-srcmask (0|1|24|32) --hashlimit-dstmask (0|24|32) --hashlimit-name {word} -j ACCEPT
-m hashlimit --hashlimit-above 5/min --hashlimit-name {word} --hashlimit-htable-size (1|1000|{u16}) --hashlimit-htable-max (2000|{u32}) --hashlimit-htable-gcinterval (60000|{u32}) --hashlimit-htable-expire (2000|{u32}) -j ACCEPT
-m hashlimit --hashlimit-above 5/sec --hashlimit-name {word} --hashlimit-rate-match (|--hashlimit-rate-interval (1|60|{u32})) -j ACCEPT

6 -m hbh ?! --hbh-len (0|255|65535|{u8}) (|--hbh-opts 1:2,23:42,4:6,8:10,42,23|--hbh-opts {u8}:{u8}) -j ACCEPT
6 -m hbh --hbh-opts {u8},{u8} -j ACCEPT

-m helper ?! --helper (ftp|sip-5060|{text}) -j ACCEPT

6 -m hl (?! --hl-eq|--hl-lt|--hl-gt) (0|1|255|{u8}) -j ACCEPT
4 -m ttl (?! --ttl-eq|--ttl-lt|--ttl-gt) (0|1|255|{u8}) -j ACCEPT

4 -p icmp -m icmp ?! --icmp-type (any|0|8|255|3/0|3/15|255/255|{u8}|{u8}/{u8}|echo-request|destination-unreachable|fragmentation-needed) -j ACCEPT
4 -p icmp -m icmp -j ACCEPT
6 -p icmpv6 -m icmp6 ?! --icmpv6-type (0|255|1/0|1/255|255/255|{u8}|{u8}/{u8}|echo-request|packet-too-big|router-solicitation) -j ACCEPT

-p ipcomp -m ipcomp ?! --ipcompspi (0|4294967295|0:|:|0:4294967295|18|{u32}|{lo32}:{hi32}) (|--compres) -j ACCEPT

-m iprange ?! --src-range ({ip}|{lo-ip}-{hi-ip}|{hi-ip}-{lo-ip}) -j ACCEPT
4 -m iprange ?! --dst-range (0.0.0.0-255.255.255.255|255.255.255.255|{lo-ip}-{hi-ip}) -j ACCEPT
6 -m iprange ?! --dst-range (::-ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff|{lo-ip}-{hi-ip}) -j ACCEPT
-m iprange ?! --src-range {lo-ip}-{hi-ip} ?! --dst-range {lo-ip}-{hi-ip} -j ACCEPT

6 -m ipv6header ?! --header (hop-by-hop|ipv6-opts,ipv6-route|ipv6-frag,ah,esp,ipv6-nonxt|protocol|43|hop,dst,route,frag,auth,esp,none,prot) (|--soft) -j ACCEPT

-m ipvs ?! --ipvs -j ACCEPT
-m ipvs ?! --vproto (1|tcp|{u8}) ?! --vaddr ({ip}|{net}) ?! --vport (1|65535|{u16}) --vdir (ORIGINAL|REPLY) ?! --vmethod (GATE|IPIP|MASQ) ?! --vportctl (21|{u16}) -j ACCEPT

-m length ?! --length (0|65535|0:65535|:5|5:|{u16}|{lo16}:{hi16}) -j ACCEPT

-m limit --limit (1/sec|10000/sec|1/min|1/hour|1/day|3/hour|7/day|600/min|999/sec) (|--limit-burst (1|5|10000)) -j ACCEPT
-m limit -j ACCEPT

-m mac ?! --mac-source (00:00:00:00:00:00|FF:FF:FF:FF:FF:FF|{mac}) -j ACCEPT

6 -p mh -m mh ?! --mh-type (0|255|0:255|:|:3|3:|brr|binding-update|binding-refresh-request:binding-error|{u8}|{lo8}:{hi8}) -j ACCEPT
6 -p mh -m mh -j ACCEPT

-p (tcp|udp|udplite|sctp|dccp) -m multiport ?! (--sports|--dports|--ports) (0|65535|0:65535|53,1024:65535|{u16}|{lo16}:{hi16}) -j ACCEPT
-p tcp -m multiport ?! --dports {u16},{u16},{u16},{u16},{u16},{u16},{u16},{u16},{u16},{u16},{u16},{u16},{u16},{u16},{u16} -j ACCEPT
-p udp -m multiport ?! --source-ports {lo16}:{hi16},{u16},{u16},{u16},{lo16}:{hi16} -m multiport ?! --destination-ports {lo16}:{hi16},{lo16}:{hi16} -j ACCEPT

-m nfacct --nfacct-name (plain|"with space") -j ACCEPT

-p tcp -m osf ?! --genre (Linux|Windows|{word}) (|--ttl (0|1|2)) (|--log (0|1|2)) -j ACCEPT

-m owner ?! --uid-owner (0|root|4294967294|0-10|{u31}|{lo31}-{hi31}) -j ACCEPT
-m owner ?! --gid-owner (0|4294967294|0-10|{u31}|{lo31}-{hi31}) (|--suppl-groups) -j ACCEPT
-m owner ?! --socket-exists -j ACCEPT
-m owner ?! --uid-owner {u31} ?! --gid-owner {u31} ?! --socket-exists -j ACCEPT

-m physdev ?! --physdev-in (eth0|eth+|a|fifteen-letters|{device}) -j ACCEPT
-m physdev ?! --physdev-in {device} ?! --physdev-out {device} ?! --physdev-is-in ?! --physdev-is-bridged -j ACCEPT
-m physdev ?! --physdev-is-in -j ACCEPT
-m physdev ?! --physdev-is-bridged ?! --physdev-out {device} -j ACCEPT

-m pkttype ?! --pkt-type (unicast|broadcast|multicast|otherhost|host|bcast) -j ACCEPT

-m policy --dir (in|out) --pol none -j ACCEPT
-m policy --dir in --pol ipsec (|--strict) ?! --reqid (0|4294967295|{u32}) ?! --spi (0|0xffffffff|{u32}) -j ACCEPT
-m policy --dir out --pol ipsec ?! --proto (esp|ah|ipcomp) ?! --mode (transport|tunnel) -j ACCEPT
-m policy --dir in --pol ipsec --strict --mode tunnel ?! --tunnel-src ({ip}|{net}) ?! --tunnel-dst ({ip}|{net}) --next ?! --reqid {u32} --next ?! --spi {u32} --proto esp --next --mode transport -j ACCEPT

-m quota ?! --quota (0|1|18446744073709551615|{u64}) -j ACCEPT

-m realm ?! --realm (0|65535|0x1/0x2a|{u16}|{x32}/{x32}) -j ACCEPT

-m recent ?! (--set|--rcheck|--update|--remove) (|--name {word}) (|--rdest) -j ACCEPT
-m recent ?! (--rcheck|--update) --seconds (1|4294967295|{u32}) (|--reap) (|--hitcount (1|19)) (|--rttl) --name {word} -j ACCEPT
4 -m recent --set --name {word} --mask (255.255.255.0|0.0.0.0|{ip}) (--rsource|--rdest) -j ACCEPT
6 -m recent --set --name {word} --mask (ffff::|::|{ip}) (--rsource|--rdest) -j ACCEPT

-t raw -m rpfilter (|--loose) (|--validmark) (|--accept-local) (|--invert) -j ACCEPT

6 -m rt ?! --rt-type (0|255|4294967295|{u32}) -j ACCEPT
6 -m rt ?! --rt-segsleft (0|4294967295|0:4294967295|:|0:|{u32}|{lo32}:{hi32}) -j ACCEPT
6 -m rt ?! --rt-type {u32} ?! --rt-segsleft {lo32}:{hi32} ?! --rt-len {u32} -j ACCEPT
6 -m rt --rt-type 0 ?! --rt-len {u32} --rt-0-res --rt-0-addrs {ip},{ip} (|--rt-0-not-strict) -j ACCEPT

-p sctp -m sctp ?! (--sport|--dport) (0|65535|0:65535|1000:|:1000|{u16}|{lo16}:{hi16}) -j ACCEPT
-p sctp -m sctp ?! --source-port {u16} ?! --destination-port {u16} -j ACCEPT
-p sctp -m sctp ?! --chunk-types (all|any|none) (INIT|DATA,INIT|DATA:BE|DATA:Be,ABORT:t|SHUTDOWN_COMPLETE:T,ASCONF,ASCONF_ACK|DATA,INIT,INIT_ACK,SACK,HEARTBEAT,HEARTBEAT_ACK,ABORT,SHUTDOWN,SHUTDOWN_ACK,ERROR,COOKIE_ECHO,COOKIE_ACK,ECN_ECNE,ECN_CWR,SHUTDOWN_COMPLETE) -j ACCEPT

-m set ?! --match-set plain (src|dst) (|--return-nomatch|! --update-counters|! --update-subcounters) -j ACCEPT
-m set --match-set plain src (?! --packets-eq|--packets-lt|--packets-gt) (0|18446744073709551615|{u64}) -j ACCEPT
-m set --match-set plain src (?! --bytes-eq|--bytes-lt|--bytes-gt) (1|{u64}) -j ACCEPT

-m socket (|--transparent) (|--nowildcard) (|--restore-skmark) -j ACCEPT

6 -m srh (?! --srh-hdr-len-eq|--srh-hdr-len-gt|! --srh-hdr-len-lt|--srh-segs-left-eq|--srh-segs-left-gt|--srh-segs-left-lt|--srh-last-entry-eq|--srh-last-entry-gt|! --srh-last-entry-lt|?! --srh-next-hdr) (0|255|{u8}) -j ACCEPT
6 -m srh ?! --srh-tag (0|65535|{u16}) -j ACCEPT
6 -m srh ?! (--srh-psid|--srh-nsid|--srh-lsid) ({ip}|{net}) -j ACCEPT
6 -m srh ?! --srh-next-hdr {u8} --srh-hdr-len-eq {u8} --srh-segs-left-gt {u8} ?! --srh-last-entry-lt {u8} --srh-tag {u16} ?! --srh-psid {net} ?! --srh-nsid {net} ?! --srh-lsid {net} -j ACCEPT
6 -m srh -j ACCEPT

-m statistic --mode random ?! --probability (0|0.5|1|0.00000000047|0.33333333349|0.{u24}) -j ACCEPT
-m statistic --mode nth ?! --every (1|4294967295|{u32}) (|--packet 0) -j ACCEPT
-m statistic --mode nth --every {hi32} --packet {lo32} -j ACCEPT

-m string ?! --string ({text}|"a b"|abc|"x'y") --algo (bm|kmp) (|--icase) -j ACCEPT
-m string --string "|0a|" --algo bm -j ACCEPT
-m string ?! --hex-string {hex} --algo bm --from (0|1|65535|{u16}) --to (65535|{hi16}) -j ACCEPT
-m string --string "GET /" --algo kmp --from {lo16} --to {hi16} --icase -j ACCEPT

-p tcp -m tcp ?! (--sport|--dport) (0|65535|0:65535|:|1:|:1|0:0|{u16}|{lo16}:{hi16}) -j ACCEPT
-p tcp -m tcp ?! --source-port {u16} ?! --destination-port {lo16}:{hi16} -j ACCEPT
-p tcp -m tcp ?! --syn -j ACCEPT
-p tcp -m tcp ?! --tcp-flags (ALL|NONE|SYN|FIN,SYN,RST,PSH,ACK,URG|SYN,RST) (ALL|NONE|SYN|RST) -j ACCEPT
-p tcp -m tcp --tcp-flags NONE (ALL|SYN) -j ACCEPT
-p tcp -m tcp ?! --tcp-option (1|255|{u8}) -j ACCEPT
-p tcp -m tcp ?! --sport {u16} --dport {u16} --tcp-flags SYN,ACK SYN ?! --tcp-option {u8} -j ACCEPT
-p udp -m udp ?! (--sport|--dport) (0|65535|0:65535|:|1:|:1|0:0|{u16}|{lo16}:{hi16}) -j ACCEPT
-p udp -m udp ?! --source-port {u16} ?! --destination-port {lo16}:{hi16} -j ACCEPT
-p (tcp|udp) -m (tcp|udp) -j ACCEPT

-p tcp --tcp-flags SYN,RST SYN -m tcpmss ?! --mss (0|65535|0:65535|536:|:536|{u16}|{lo16}:{hi16}) -j ACCEPT

-m time --timestart (00:00|01:02:03|23:59:59) --timestop (23:59:59|00:00|04:05:06) (|--kerneltz|--contiguous) -j ACCEPT
-m time ?! --monthdays (1|31|1,15,31|{day}) -j ACCEPT
-m time ?! --weekdays (Mon|Mon,Tue,Wed,Thu,Fri,Sat,Sun|1,7|Sa,Su) -j ACCEPT
-m time --datestart (1970|1970-01-01T00:00:01|2038-01-19T03:14:07|{date}) -j ACCEPT
-m time --datestop (1970-01-02|2038-01-19T03:14:07|{date}) -j ACCEPT
-m time --datestart {lo-date} --datestop {hi-date} --timestart {clock} --timestop {clock} ?! --monthdays {day},{day} ?! --weekdays Tue,Fri (|--kerneltz) -j ACCEPT

-m tos ?! --tos (0|0xff|0x10/0x3f|Minimize-Delay|0xff/0xff|{x8}|{x8}/{x8}) -j ACCEPT

4 -m u32 ?! --u32 (0=0|"0 & 0xFFFFFFFF = {x32}"|"6 & 0xFF = 1 && 4 & 0x1FFF = 0"|"0 >> 22 & 0x3C @ 4 >> 24 = {x32}:0xffffffff"|"{x16} << 3 = {x32},{x32},0:0xffffffff"|"12 & {x32} = {x32}") -j ACCEPT
6 -m u32 ?! --u32 ("{x16} & {x32} = {x32}"|"4=0:0xffffffff") -j ACCEPT

# Targets.
-j AUDIT --type (accept|drop|reject)
-t mangle -j CHECKSUM --checksum-fill
-t mangle -j CLASSIFY --set-class (0:0|ffff:ffff|0:{class}|{class}:{class})
-t mangle -j CONNMARK (--set-xmark|--set-mark) (0|0xffffffff|{x32}|{x32}/{x32}|0/0)
-t mangle -j CONNMARK (--and-mark|--or-mark|--xor-mark) (0|0xffffffff|{x32})
-t mangle -j CONNMARK (--save-mark|--restore-mark) (|--mask {x32}|--nfmask {x32} --ctmask {x32}|--nfmask 0 --ctmask 0)
-t mangle -j CONNMARK --set-xmark {x32}/{x32} (--left-shift-mark|--right-shift-mark) (0|1|31|{u5})
-t mangle -j CONNMARK (--restore-mark|--save-mark) (--left-shift-mark|--right-shift-mark) (1|31) --nfmask {x32} --ctmask {x32}
-t security -j CONNSECMARK (--save|--restore)
-t raw -j CT --notrack
-t raw -j NOTRACK
-t raw -j CT (--zone|--zone-orig|--zone-reply) (0|1|65535|mark|{u16})
-t raw -j CT --ctevents (new|new,related,destroy,reply,assured,protoinfo,helper,mark,natseqinfo,secmark|mark,secmark) (|--expevents new)
-t raw -p tcp -j CT --helper ftp (|--zone {u16})
-t nat -p tcp -j DNAT --to-destination ({ip}|{lo-ip}-{hi-ip}|{ip:}:{u16}|:{u16}|:{lo16}-{hi16}|{ip:}:{lo16}-{hi16}|{ip:}:{lo16}-{hi16}/{lo16}) (|--random) (|--persistent)
-t nat -p udp -j SNAT --to-source ({ip}|{lo-ip}-{hi-ip}|{ip:}:{u16}|:{lo16}-{hi16}|{ip:}:1-65535) (|--random|--random-fully) (|--persistent)
-t nat -j SNAT --to-source {ip}
-t nat -p tcp -j MASQUERADE (|--to-ports (1|65535|{u16}|{lo16}-{hi16})) (|--random|--random-fully)
-t nat -p tcp -j REDIRECT (|--to-ports (1|65535|{u16}|{lo16}-{hi16})) (|--random)
-t nat -j NETMAP --to ({net}|{ip})
6 -t mangle -j (SNPT|DNPT) --src-pfx {net64} --dst-pfx {net64}
6 -t mangle -j (SNPT|DNPT) --src-pfx dead::/16 --dst-pfx 1c3::/(16|8|64)
-t mangle -j DSCP --set-dscp (0|0x3f|{u5})
-t mangle -j DSCP --set-dscp-class (BE|EF|CS5|AF21)
4 -t mangle -p tcp -j ECN --ecn-tcp-remove
6 -t mangle -j HL (--hl-set|--hl-inc|--hl-dec) (1|255|{u8})
4 -t mangle -j TTL (--ttl-set|--ttl-inc|--ttl-dec) (1|255|{u8})
-t mangle -j HMARK --hmark-tuple (src|dst|src,dst,sport,dport,proto|ct|spi) --hmark-mod (1|4294967295|{u32}) --hmark-offset (0|{u32}) --hmark-rnd {x32}
-t mangle -j HMARK --hmark-src-prefix (0|24|32) --hmark-dst-prefix (1|32) --hmark-sport-mask {x16} --hmark-dport-mask {x16} --hmark-proto-mask {x8} --hmark-mod {u32} --hmark-rnd {x32} --hmark-offset {u32}
-t mangle -j HMARK --hmark-tuple sport,dport,proto --hmark-sport {x16} --hmark-dport {x16} --hmark-mod {u32} --hmark-rnd {x32}
-t mangle -p esp -j HMARK --hmark-tuple spi (--hmark-spi-mask|--hmark-spi) {x32} --hmark-mod {u32} --hmark-rnd {x32}
-j IDLETIMER --timeout (1|86400|{u16}) --label {word} (|--alarm)
-j LED --led-trigger-id {text} (|--led-delay (1|inf|{u24})) (|--led-always-blink)
-j LOG (|--log-level (0|7|debug|alert)) (|--log-prefix ({text}|"a: "|x|"a\\b")) (|--log-tcp-sequence --log-tcp-options --log-ip-options --log-uid --log-macdecode)
-t mangle -j MARK (--set-xmark|--set-mark) (0|0xffffffff|{x32}|{x32}/{x32}|0/0)
-t mangle -j MARK (--and-mark|--or-mark|--xor-mark) (0|0xffffffff|{x32})
-j NFLOG (|--nflog-group (0|1|65535|{u16})) (|--nflog-prefix ({text}|x)) (|--nflog-threshold (1|65535|{u16})) (|--nflog-size (0|{u32})|--nflog-range {u32})
-j NFQUEUE (|--queue-num (0|65535|{u16})|--queue-balance (0:65534|{lo16}:{hi16})) (|--queue-bypass)
-j NFQUEUE --queue-balance {lo16}:{hi16} --queue-cpu-fanout (|--queue-bypass)
-t mangle -j RATEEST --rateest-name {word} --rateest-interval (250ms|500ms) --rateest-ewmalog (1s|2s|8s)
4 -j REJECT (|--reject-with (icmp-net-unreachable|icmp-host-unreachable|icmp-proto-unreachable|icmp-port-unreachable|icmp-net-prohibited|icmp-host-prohibited|icmp-admin-prohibited))
6 -j REJECT (|--reject-with (icmp6-no-route|icmp6-adm-prohibited|icmp6-addr-unreachable|icmp6-port-unreachable|icmp6-policy-fail|icmp6-reject-route))
-p tcp -j REJECT --reject-with tcp-reset
-t security -j SECMARK --selctx {word}
-j SET (--add-set|--del-set) plain (src|dst) -m comment --comment (a|b)
-j SET --add-set plain src --exist --timeout (0|4294967|{u16})
-t mangle -j SET --map-set plain src (--map-mark|--map-prio|--map-queue)
-p tcp -j SYNPROXY (|--sack-perm) (|--timestamp) --wscale (0|14|{u3}) --mss (0|65535|{u16}) (|--ecn)
-t mangle -p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS (--set-mss (0|65535|{u16})|--clamp-mss-to-pmtu)
-t mangle -p tcp -j TCPOPTSTRIP --strip-options (2|wscale,mss,sack-permitted,sack,timestamp,md5|{u8}|{u8},{u8})
-t mangle -j TEE --gateway {ip} (|--oif (lo|{device}))
-t mangle -j TOS --set-tos (0|0xff|0x10/0x3f|Minimize-Delay|{x8}|{x8}/{x8})
-t mangle -j TOS (--and-tos|--or-tos|--xor-tos) (0|0xff|{x8})
-t mangle -p tcp -j TPROXY --on-port (0|65535|{u16}) (|--on-ip {ip}) (|--tproxy-mark ({x32}|{x32}/{x32}|0/0))
-t raw -j TRACE
`

// corpusRules draws the rules of the corpus for a family, in order, by their tables.
func corpusRules(r *rand.Rand, family rules.Family) map[rules.TableName][]string {
	found, seen := map[rules.TableName][]string{}, map[string]bool{}
	for line := range strings.Lines(corpus) {
		line = strings.TrimSpace(line)
		if line == "" || line[0] == '#' {
			continue
		}
		if only, rest, ok := strings.Cut(line, " "); ok && (only == "4" || only == "6") {
			if (only == "6") != (family == rules.IPv6) {
				continue
			}
			line = rest
		}
		table := "filter"
		if rest, ok := strings.CutPrefix(line, "-t "); ok {
			table, line, _ = strings.Cut(rest, " ")
		}
		for _, args := range spread(r, strings.ReplaceAll(line, "?! ", "(|! )")) {
			args = drawn(r, family, strings.Join(strings.Fields(args), " "))
			if key := table + " " + args; !seen[key] {
				seen[key] = true
				found[rules.TableName(table)] = append(found[rules.TableName(table)], args)
			}
		}
	}
	return found
}

// spread expands the (a|b) of a line, which may be nested. Each alternative is in
// at least one rule, next to different ones.
func spread(r *rand.Rand, line string) []string {
	text, groups := cutGroups(line)
	most, all := 1, 1
	var parts [][]string
	for _, g := range groups {
		var options []string
		for _, option := range g {
			options = append(options, spread(r, option)...)
		}
		r.Shuffle(len(options), func(i, j int) { options[i], options[j] = options[j], options[i] })
		parts, most, all = append(parts, options), max(most, len(options)), all*len(options)
	}
	var lines []string
	for i := range min(2*most, all) {
		var out strings.Builder
		for n, options := range parts {
			out.WriteString(text[n])
			// Otherwise two groups of the same size would always use the same
			// index.
			out.WriteString(options[(i+i/len(options)*n)%len(options)])
		}
		lines = append(lines, out.String()+text[len(parts)])
	}
	return lines
}

// cutGroups cuts a line into the alternatives of its outermost groups, and the text around them.
func cutGroups(line string) (text []string, groups [][]string) {
	depth, from := 0, 0
	for i := range len(line) {
		switch c := line[i]; {
		case c == '(':
			if depth++; depth == 1 {
				text, groups, from = append(text, line[from:i]), append(groups, nil), i+1
			}
		case c == '|' && depth == 1, c == ')' && depth == 1:
			groups[len(groups)-1], from = append(groups[len(groups)-1], line[from:i]), i+1
			if c == ')' {
				depth = 0
			}
		case c == ')':
			depth--
		}
	}
	return append(text, line[from:]), groups
}

// drawn puts a random value in the place of each {name}.
func drawn(r *rand.Rand, family rules.Family, line string) string {
	var out strings.Builder
	for {
		before, rest, found := strings.Cut(line, "{")
		out.WriteString(before)
		if !found {
			return out.String()
		}
		name, after, _ := strings.Cut(rest, "}")
		out.WriteString(corpusValue(r, family, name))
		line = after
	}
}

// textLike returns bytes that look like text, half of the time with a space or a quote.
func textLike(r *rand.Rand, n int) []byte {
	text := make([]byte, n)
	for i := range text {
		text[i] = byte(' ' + r.IntN('~'-' '+1))
	}
	if r.IntN(2) == 0 {
		text[r.IntN(n)] = " \""[r.IntN(2)]
	}
	return text
}

// corpusValue draws a value. Names with lo and hi are the ends of ranges.
func corpusValue(r *rand.Rand, family rules.Family, name string) string {
	size := 4
	if family == rules.IPv6 {
		size = 16
	}
	number := func(bytes int, from byte) uint64 {
		text := textLike(r, bytes)
		switch from {
		case 'l':
			text[0] = byte(' ' + r.IntN(16))
		case 'h':
			text[0] = byte('@' + r.IntN('~'-'@'))
		}
		return binary.BigEndian.Uint64(append(make([]byte, 8-bytes), text...))
	}
	address := func(from byte) netip.Addr {
		text := textLike(r, size)
		switch from {
		case 'l':
			text[0] = '!'
		case 'h':
			text[0] = 'a'
		}
		addr, _ := netip.AddrFromSlice(text)
		return addr
	}
	date := func(from byte) string {
		return time.Unix(int64(number(4, from)), 0).UTC().Format("2006-01-02T15:04:05")
	}
	quoted := func(text []byte) string {
		return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(string(text)) + `"`
	}
	switch name {
	case "u3":
		return strconv.Itoa(r.IntN(8))
	case "u5":
		return strconv.Itoa(r.IntN(32))
	case "u31", "lo31", "hi31": // not a user's name
		return fmt.Sprint(number(4, name[0]))
	case "u8", "lo8", "hi8", "u16", "lo16", "hi16", "u24", "u32", "lo32", "hi32", "u64", "lo64", "hi64":
		bits, _ := strconv.Atoi(strings.TrimLeft(name, "ulohi"))
		return fmt.Sprint(number(bits/8, name[0]))
	case "x8", "x16", "x32":
		bits, _ := strconv.Atoi(name[1:])
		return fmt.Sprintf("%#x", number(bits/8, 'x'))
	case "class":
		return fmt.Sprintf("%x", number(2, 'x'))
	case "ip", "lo-ip", "hi-ip":
		return address(name[0]).String()
	case "ip:": // before a port
		if family == rules.IPv6 {
			return "[" + address(' ').String() + "]"
		}
		return address(' ').String()
	case "net":
		return netip.PrefixFrom(address(' '), 1+r.IntN(8*size)).Masked().String()
	case "net64":
		return netip.PrefixFrom(address(' '), 64).Masked().String()
	case "mac":
		text := textLike(r, 6)
		return strings.ToUpper(fmt.Sprintf("%02x:%02x:%02x:%02x:%02x:%02x", text[0], text[1], text[2], text[3], text[4], text[5]))
	case "device", "word":
		return fmt.Sprintf("w%x", number(4, 'x'))
	case "text":
		text := textLike(r, 4+r.IntN(10))
		return quoted(append([]byte{'T'}, append(text, 'x')...))
	case "hex":
		return fmt.Sprintf("%q", fmt.Sprintf("|%x|", textLike(r, 3+r.IntN(9))))
	case "day":
		return strconv.Itoa(1 + r.IntN(31))
	case "date":
		return date(' ')
	case "lo-date", "hi-date":
		return date(name[0])
	case "clock":
		return fmt.Sprintf("%02d:%02d:%02d", r.IntN(24), r.IntN(60), r.IntN(60))
	}
	panic("no value " + name)
}

// A way is a method of writing rules back.
type way string

const (
	byBytes way = "nft, by bytes"
	asText  way = "nft, as text"
	legacy  way = "legacy, as text"
)
