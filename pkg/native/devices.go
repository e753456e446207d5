package native

import (
	"golang.org/x/sys/unix"

	"github.com/canaryd/canaryd/pkg/nft"
)

// present returns an object's attributes less the devices that the node lacks. They stand in the
// attribute hook, one in the attribute dev of it, or several in the list devs.
func (w *writer) present(attrs []byte, hook, dev, devs uint16) []byte {
	if w.o.Lacks == nil {
		return attrs
	}
	var out []byte
	for a, err := range attributes(attrs) {
		switch {
		case err != nil:
			return attrs
		case a.kind == hook:
			out = appendNested(out, hook, w.presentIn(a.value, dev, devs))
		default:
			out = appendRaw(out, a)
		}
	}
	return out
}

func (w *writer) presentIn(hook []byte, dev, devs uint16) []byte {
	var out []byte
	for a, err := range attributes(hook) {
		switch {
		case err != nil:
			return hook
		case dev != 0 && a.kind == dev && w.lacks(a.value):
		case a.kind == devs:
			var list []byte
			for d, err := range attributes(a.value) {
				if err == nil && (d.kind != deviceName || !w.lacks(d.value)) {
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

// lacks reports whether the node lacks a device, and notes it.
func (w *writer) lacks(name []byte) bool {
	device := nft.String(name)
	if !w.o.Lacks(device) {
		return false
	}
	w.leftBy = append(w.leftBy, device)
	return true
}
