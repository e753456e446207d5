package native

import (
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
	"github.com/canaryd/canaryd/pkg/tableid"
)

// lacksDevice is the Options.Lacks of a Repair. A chain keeps an absent device if the kernel
// accepts that.
func lacksDevice(of nft.ObjectKind, device string) bool {
	_, err := net.InterfaceByName(device)
	return err != nil && (of != nft.Chains || !takesAbsentDevices())
}

// takesAbsentDevices reports whether the kernel accepts a chain on an absent device, as it does
// since Linux 6.16. It hooks the chain to the device when the device appears. If the kernel cannot
// be tested, canaryd leaves out absent devices until it restarts.
var takesAbsentDevices = sync.OnceValue(func() bool {
	hook := nft.AppendAttr(nil, unix.NFTA_HOOK_HOOKNUM, make([]byte, 4), 0) // ingress
	hook = nft.AppendAttr(hook, unix.NFTA_HOOK_PRIORITY, make([]byte, 4), 0)
	hook = nft.AppendAttr(hook, unix.NFTA_HOOK_DEV, "canaryd-absent", 1)
	attrs := nft.AppendAttr(nil, unix.NFTA_CHAIN_TYPE, "filter", 1)
	attrs = nft.AppendAttr(attrs, unix.NFTA_CHAIN_HOOK|unix.NLA_F_NESTED, hook, 0)
	return (&Table{ID: tableid.Netdev.Table(rehearsalName), Chains: []Chain{{Name: "c", Base: true, Attrs: attrs}}}).Rehearse() == nil
})

// present returns an object's attributes without the devices that the node lacks, because a
// kernel may refuse the whole transaction for one. The devices are in the attribute hook: one
// in its attribute dev (0: never), or several in its list devs.
func (w *writer) present(of nft.ObjectKind, attrs []byte, hook, dev, devs uint16) []byte {
	if w.o.Lacks == nil {
		return attrs
	}
	var out []byte
	for a, err := range attributes(attrs) {
		switch {
		case err != nil:
			return attrs
		case a.kind == hook:
			out = appendNested(out, hook, w.presentIn(of, a.value, dev, devs))
		default:
			out = appendRaw(out, a)
		}
	}
	return out
}

// presentIn returns the hook attribute of present without the devices that the node lacks. dev
// is the attribute with one device (0: there is none), and devs the attribute with the list of
// devices.
func (w *writer) presentIn(of nft.ObjectKind, hook []byte, dev, devs uint16) []byte {
	var out []byte
	for a, err := range attributes(hook) {
		switch {
		case err != nil:
			return hook
		case dev != 0 && a.kind == dev && w.lacks(of, a.value):
		case a.kind == devs:
			var list []byte
			for d, err := range attributes(a.value) {
				if err == nil && (d.kind != deviceName || !w.lacks(of, d.value)) {
					list = appendRaw(list, d)
				}
			}
			out = nft.AppendAttr(out, devs|unix.NLA_F_NESTED, list, 0)
		default:
			out = appendRaw(out, a)
		}
	}
	return out
}

// lacks reports whether the node lacks a network device, and notes it in leftBy for the log.
// name is the attribute's value; of says whether a chain or a flowtable has the device. Without
// the device the kernel may refuse the whole transaction, so the writer leaves it out.
func (w *writer) lacks(of nft.ObjectKind, name []byte) bool {
	device := nft.String(name)
	if !w.o.Lacks(of, device) {
		return false
	}
	w.leftBy = append(w.leftBy, device)
	return true
}
