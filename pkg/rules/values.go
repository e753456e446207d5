package rules

import (
	"math"
	"slices"
	"strconv"
	"strings"
)

// Each function here returns the canonical spelling of a value: values of one meaning have one
// spelling. ok is false for a value that it cannot read. Such a value is compared as it is.

// number reads an unsigned number of size bits as strtoul does with base 0: hexadecimal
// after 0x, octal after 0 (xtables_strtoui of iptables 1.8.9).
func number(text string, size int) (n uint64, ok bool) {
	base := 10
	if len(text) > 1 && text[0] == '0' {
		base, text = 8, text[1:]
		if text[0] == 'x' || text[0] == 'X' {
			base, text = 16, text[1:]
		}
	}
	n, err := strconv.ParseUint(text, base, size)
	return n, err == nil
}

func decimal(text string) (string, bool) {
	n, ok := number(text, 32)
	return strconv.FormatUint(n, 10), ok
}

func hexadecimal(n uint32) string { return "0x" + strconv.FormatUint(uint64(n), 16) }

// markMask reads VALUE or VALUE/MASK, of a mark. Without a mask, every bit counts. False:
// the mark is unknown, so that no test of it is certain.
func markMask(text string) (value, mask uint32, ok bool) {
	v, m, masked := strings.Cut(text, "/")
	n, ok := number(v, 32)
	if !ok {
		return 0, 0, false
	}
	k := uint64(math.MaxUint32)
	if masked {
		if k, ok = number(m, 32); !ok {
			return 0, 0, false
		}
	}
	return uint32(n), uint32(k), true
}

// markText writes a mark's value and mask in canonical form: a full mask is left out.
func markText(value, mask uint32) string {
	if mask == math.MaxUint32 {
		return hexadecimal(value)
	}
	return hexadecimal(value) + "/" + hexadecimal(mask)
}

func mark(text string) (string, bool) {
	v, m, ok := markMask(text)
	return markText(v, m), ok
}

// setMark writes --set-mark as --set-xmark. The targets MARK and CONNMARK only compute (mark
// AND NOT mask) XOR value (struct xt_mark_tginfo2 in xt_mark.h). This function, and the
// arguments of xmark in marks, follow libxt_MARK.c and libxt_CONNMARK.c, measured on both
// backends.
func setMark(text string) (string, bool) {
	v, m, ok := markMask(text)
	return markText(v, v|m), ok
}

// xmark returns a value that writes --and-mark, --or-mark or --xor-mark as --set-xmark: of
// turns its number into value and mask.
func xmark(of func(n uint32) (value, mask uint32)) value {
	return func(text string) (string, bool) {
		n, ok := number(text, 32)
		return markText(of(uint32(n))), ok
	}
}

func bitMask(text string) (string, bool) {
	n, ok := number(text, 32)
	return hexadecimal(uint32(n)), ok
}

// idRange reads ONE or FIRST-LAST of --uid-owner or --gid-owner. False for a user's or
// group's name other than root: it may have another number elsewhere.
func idRange(text string) (string, bool) {
	if text == "root" { // the only name with the same number on every machine
		return "0", true
	}
	return span(text, "-", "", decimal)
}

func lengthRange(text string) (string, bool) { return span(text, ":", "65535", decimal) }

func timeRange(text string) (string, bool) { return span(text, ":", "4294967295", decimal) }

// span reads ONE or FIRST sep LAST, for ranges of ports, lengths and times; one reads each
// end. An open end means 0 or most; without most no end may be open.
func span(text, sep, most string, one func(string) (string, bool)) (string, bool) {
	first, last, ranged := strings.Cut(text, sep)
	if !ranged {
		return one(text)
	}
	if first == "" && most != "" {
		first = "0"
	}
	if last == "" {
		last = most
	}
	a, ok := one(first)
	b, okToo := one(last)
	if !ok || !okToo {
		return "", false
	}
	if a == b {
		return a, true
	}
	return a + sep + b, true
}

// wordList reads a list of names in which order, repetition and case have no meaning, such
// as the states of --ctstate. It is never false.
func wordList(text string) (string, bool) {
	upper := strings.ToUpper(text)
	if !strings.Contains(upper, ",") {
		return upper, true
	}
	list := strings.Split(upper, ",")
	slices.Sort(list)
	return strings.Join(slices.Compact(list), ","), true
}

func upper(text string) (string, bool) { return strings.ToUpper(text), true }

// tcpFlags reads either list of --tcp-flags: the flags in iptables' order, or NONE. False: a
// name is unknown.
func tcpFlags(text string) (string, bool) {
	all := [...]string{"FIN", "SYN", "RST", "PSH", "ACK", "URG"}
	given := strings.Split(strings.ToUpper(text), ",")
	var set []string
	for _, flag := range given {
		switch flag {
		case "ALL":
			set = append(set, all[:]...)
		case "NONE":
		default:
			if !slices.Contains(all[:], flag) {
				return "", false
			}
			set = append(set, flag)
		}
	}
	var list []string
	for _, flag := range all {
		if slices.Contains(set, flag) {
			list = append(list, flag)
		}
	}
	if list == nil {
		return "NONE", true
	}
	return strings.Join(list, ","), true
}

// probability reads the value of --probability. It rounds to steps of 1/2^31, as the kernel
// does, and prints eleven digits, as iptables does (libxt_statistic.c). False: it is not
// within 0 and 1.
func probability(text string) (string, bool) {
	p, err := strconv.ParseFloat(text, 64)
	if err != nil || !(p >= 0 && p <= 1) {
		return "", false
	}
	const steps = 1 << 31
	return strconv.FormatFloat(math.Round(p*steps)/steps, 'f', 11, 64), true
}

// rate returns COUNT/UNIT of match limit as iptables prints it, for Meaning; false if it
// cannot be read. The kernel keeps ten-thousandths of a second per packet, and iptables
// prints the largest unit that loses nothing (parse_rate and print_rate of libxt_limit.c). So
// 60/min is 1/sec, and 7000/hour becomes 7001/hour.
func rate(text string) (string, bool) {
	units := [...]struct {
		name, full string
		every      uint64
	}{{"day", "day", 864000000}, {"hour", "hour", 36000000}, {"min", "minute", 600000}, {"sec", "second", 10000}}
	count, unit, given := strings.Cut(text, "/")
	n, err := strconv.ParseUint(count, 10, 32)
	if err != nil || n == 0 {
		return "", false
	}
	every := uint64(10000)
	if given {
		i := 0
		for i < len(units) && !strings.HasPrefix(units[i].full, strings.ToLower(unit)) {
			i++
		}
		if unit == "" || i == len(units) {
			return "", false
		}
		every = units[i].every
	}
	// A second reading of the printed rate may change it again: 9999/sec becomes 10000/sec.
	printed := ""
	for range 8 {
		wait := every / n
		if wait == 0 {
			return "", false
		}
		i := 1
		for ; i < len(units); i++ {
			u := units[i].every
			if wait > u || u/wait < u%wait {
				break
			}
		}
		n, every = units[i-1].every/wait, units[i-1].every
		now := strconv.FormatUint(n, 10) + "/" + units[i-1].name
		if now == printed {
			return now, true
		}
		printed = now
	}
	return "", false
}

// named returns a value that reads the names in the map, in any case, and gives their
// canonical spelling.
func named(names map[string]string) func(string) (string, bool) {
	return func(text string) (string, bool) {
		n, ok := names[strings.ToLower(text)]
		return n, ok
	}
}
