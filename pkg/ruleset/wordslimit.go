package ruleset

import (
	"strconv"

	"golang.org/x/sys/unix"
)

// This file reads limits: as expressions of nf_tables, and as xt_limit of x_tables.

// limit adds the words of a limit expression; expression calls it. iptables prints it by the
// numbers of xt_limit, which round the rate. False: the printed rate would differ, or the
// limit has another form. Then the rule has no words.
func (d *decoder) limit(data *fields) bool {
	rate, unit := data.number64(unix.NFTA_LIMIT_RATE), data.number64(unix.NFTA_LIMIT_UNIT)
	burst, kind, flags := data.number(unix.NFTA_LIMIT_BURST), data.number(unix.NFTA_LIMIT_TYPE), data.number(unix.NFTA_LIMIT_FLAGS)
	if kind != unix.NFT_LIMIT_PKTS || flags != 0 || rate == 0 || rate > limitScale || unit > limitUnits[0].seconds || !d.once(limitMatch) || d.counted {
		return false
	}
	said, n := d.sayLimit(limitScale*unit/rate, burst)
	return said == rate && limitUnits[n].seconds == unit
}

// xtLimit adds the words of -m limit from its data, struct xt_rateinfo; match calls it. False:
// iptables would read the printed rate as another one, and the rule has no words.
func (d *decoder) xtLimit(x xtInfo) bool {
	if len(x) != 40 || !x.zeroFrom(8) {
		return false
	}
	average := uint64(x.u32(0))
	said, n := d.sayLimit(average, x.u32(4))
	return said > 0 && limitScale*limitUnits[n].seconds/said == average
}

const limitScale = 10000 // XT_LIMIT_SCALE

// sayLimit adds the words of a limit as iptables prints it. It returns the printed rate, 0 for
// none, and the number of its unit. iptables reads no larger burst than 10,000. average is the
// time between two packets in xt_limit's units, for limit and xtLimit.
func (d *decoder) sayLimit(average uint64, burst uint32) (rate uint64, n int) {
	const usualBurst, mostBurst = 5, 10000 // XT_LIMIT_BURST; the maximum in libxt_limit.c
	if average == 0 || burst > mostBurst {
		return 0, 0
	}
	for ; n+1 < len(limitUnits); n++ { // find the shortest unit in which the rate is nearly whole
		if next := limitScale * limitUnits[n+1].seconds; average > next || next/average < next%average {
			break
		}
	}
	rate = limitScale * limitUnits[n].seconds / average
	d.matches = append(strconv.AppendUint(append(d.matches, " -m limit --limit "...), rate, 10), limitUnits[n].name...)
	if burst != usualBurst {
		d.matches = strconv.AppendUint(append(d.matches, " --limit-burst "...), uint64(burst), 10)
	}
	return rate, n
}

var limitUnits = []struct {
	seconds uint64
	name    string
}{{86400, "/day"}, {3600, "/hour"}, {60, "/min"}, {1, "/sec"}}
