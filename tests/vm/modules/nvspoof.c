// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * Makes emulated PCI devices look like NVIDIA's to the kernel: answers reads of their identity from configuration space, then scans the bus
 * again. slots=00:05.0,00:05.1: function 0 becomes a GPU, any other its audio function. It has no exit function, so it also stands for a
 * module that can never be removed.
 */
#include <linux/module.h>
#include <linux/pci.h>

#define MOST 8

static char *slots[MOST];
static int count;
module_param_array(slots, charp, &count, 0444);

static struct {
	unsigned int devfn;
	u32 id, class;
} spoofed[MOST];
static struct pci_ops *original, own;

static int spoof_read(struct pci_bus *bus, unsigned int devfn, int where, int size, u32 *value)
{
	int i, result = original->read(bus, devfn, where, size, value);
	u32 word;

	for (i = 0; !result && bus->number == 0 && i < count; i++) {
		if (spoofed[i].devfn != devfn)
			continue;
		switch (where & ~3) {
		case PCI_VENDOR_ID:
			word = spoofed[i].id;
			break;
		case PCI_CLASS_REVISION:
			word = spoofed[i].class;
			break;
		case PCI_SUBSYSTEM_VENDOR_ID:
			word = 0x16c110de;
			break;
		default:
			return 0;
		}
		word >>= (where & 3) * 8;
		*value = size == 4 ? word : word & ((1u << (size * 8)) - 1);
	}
	return result;
}

static int __init spoof_init(void)
{
	unsigned int bus_number, device, function;
	struct pci_bus *bus = pci_find_bus(0, 0);
	int i;

	if (!bus)
		return -ENODEV;
	for (i = 0; i < count; i++) {
		if (sscanf(slots[i], "%x:%x.%x", &bus_number, &device, &function) != 3 || bus_number)
			return -EINVAL;
		spoofed[i].devfn = PCI_DEVFN(device, function);
		spoofed[i].id = (function ? 0x22ba10deu : 0x233010deu);
		spoofed[i].class = function ? 0x040300a1 : 0x030200a1;
	}
	original = bus->ops;
	own = *original;
	own.read = spoof_read;
	pci_bus_set_ops(bus, &own);
	pci_lock_rescan_remove();
	for (i = 0; i < count; i++) {
		struct pci_dev *found = pci_get_slot(bus, spoofed[i].devfn);

		if (found) {
			pci_stop_and_remove_bus_device(found);
			pci_dev_put(found);
		}
	}
	pci_rescan_bus(bus);
	pci_unlock_rescan_remove();
	return 0;
}

module_init(spoof_init);
MODULE_LICENSE("Dual MIT/GPL");
