package conntrack

// What tests know of the inside.
const MostDeleted = mostDeleted

// ParseEntry returns whether a message is a flow that may be deleted.
func ParseEntry(message []byte) (attributes []byte, translated, ok bool) {
	e, ok := parseEntry(message)
	return e.attributes, e.translated, ok
}
