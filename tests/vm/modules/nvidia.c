// SPDX-License-Identifier: MIT OR GPL-2.0
/*
 * Stand-in for NVIDIA's kernel module, for a test guest only. Open files and mappings of its devices hold a reference to it, a PCI driver
 * binds by class, /proc/driver/nvidia/version names a version. It needs no hardware.
 *
 * Unlike the real one its device nodes come by themselves (devtmpfs). Parameters, all in milliseconds:
 *   remove_ms  how long an unbind takes
 *   linger_ms  how long a reference stays after the last close, as the real one's teardown takes a moment
 *   exit_ms    how long the module's removal takes at most; 0 written to it meanwhile ends that
 */
#include <linux/atomic.h>
#include <linux/cdev.h>
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/workqueue.h>
#include "compat.h"

#define MAJOR_NUMBER 195
#define MINORS 256
#define CONTROL_MINOR 255
#define DRIVER_VERSION "550.54.15"

static int gpus = 1;
module_param(gpus, int, 0444);
static int remove_ms;
module_param(remove_ms, int, 0644);
static int linger_ms;
module_param(linger_ms, int, 0644);
static int exit_ms;
module_param(exit_ms, int, 0644);

static unsigned long page; /* what a mapping of the device shows */
static struct proc_dir_entry *proc_dir;
static struct class *class;
static struct cdev cdev;

static void let_go(struct work_struct *work)
{
	module_put(THIS_MODULE);
}
static DECLARE_DELAYED_WORK(lingering, let_go);

static int device_open(struct inode *inode, struct file *file)
{
	return 0;
}

static int device_release(struct inode *inode, struct file *file)
{
	if (linger_ms > 0) {
		__module_get(THIS_MODULE);
		if (!schedule_delayed_work(&lingering, msecs_to_jiffies(linger_ms)))
			module_put(THIS_MODULE); /* it lingers already */
	}
	return 0;
}

static int device_mmap(struct file *file, struct vm_area_struct *area)
{
	if (area->vm_end - area->vm_start != PAGE_SIZE)
		return -EINVAL;
	return remap_pfn_range(area, area->vm_start, virt_to_phys((void *)page) >> PAGE_SHIFT, PAGE_SIZE, area->vm_page_prot);
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.open = device_open,
	.release = device_release,
	.mmap = device_mmap,
	.llseek = noop_llseek,
};

static int version_show(struct seq_file *file, void *unused)
{
	seq_puts(file, "NVRM version: NVIDIA UNIX x86_64 Kernel Module  " DRIVER_VERSION "  (test stand-in)\n");
	return 0;
}

int nvidia_get_rm_ops(void);
int nvidia_get_rm_ops(void)
{
	return 0;
}
EXPORT_SYMBOL_GPL(nvidia_get_rm_ops);

static int gpu_probe(struct pci_dev *device, const struct pci_device_id *id)
{
	return pci_enable_device(device);
}

static void gpu_remove(struct pci_dev *device)
{
	msleep(remove_ms);
	pci_disable_device(device);
}

static const struct pci_device_id ids[] = {
	{ PCI_DEVICE(0x10de, PCI_ANY_ID), .class = 0x030000, .class_mask = 0xff0000 },
	{}
};
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver driver = { .name = "nvidia", .id_table = ids, .probe = gpu_probe, .remove = gpu_remove };

static void remove_nodes(void)
{
	int i;

	for (i = 0; i < gpus; i++)
		device_destroy(class, MKDEV(MAJOR_NUMBER, i));
	device_destroy(class, MKDEV(MAJOR_NUMBER, CONTROL_MINOR));
	class_destroy(class);
}

static int __init stand_in_init(void)
{
	int result, i;

	page = get_zeroed_page(GFP_KERNEL);
	if (!page)
		return -ENOMEM;
	result = register_chrdev_region(MKDEV(MAJOR_NUMBER, 0), MINORS, "nvidia");
	if (result)
		goto free;
	cdev_init(&cdev, &operations);
	cdev.owner = THIS_MODULE;
	result = cdev_add(&cdev, MKDEV(MAJOR_NUMBER, 0), MINORS);
	if (result)
		goto unregister;
	class = stand_in_class("nvidia");
	if (IS_ERR(class)) {
		result = PTR_ERR(class);
		goto delete;
	}
	for (i = 0; i < gpus; i++)
		device_create(class, NULL, MKDEV(MAJOR_NUMBER, i), NULL, "nvidia%d", i);
	device_create(class, NULL, MKDEV(MAJOR_NUMBER, CONTROL_MINOR), NULL, "nvidiactl");
	result = pci_register_driver(&driver);
	if (!result) {
		proc_dir = proc_mkdir("driver/nvidia", NULL);
		proc_create_single("version", 0444, proc_dir, version_show);
		return 0;
	}
	remove_nodes();
delete:
	cdev_del(&cdev);
unregister:
	unregister_chrdev_region(MKDEV(MAJOR_NUMBER, 0), MINORS);
free:
	free_page(page);
	return result;
}

static void __exit stand_in_exit(void)
{
	int waited;

	for (waited = 0; waited < exit_ms; waited += 10) /* writing 0 to the parameter ends it */
		msleep(10);
	flush_delayed_work(&lingering); /* its last lines may still run */
	proc_remove(proc_dir);
	pci_unregister_driver(&driver);
	remove_nodes();
	cdev_del(&cdev);
	unregister_chrdev_region(MKDEV(MAJOR_NUMBER, 0), MINORS);
	free_page(page);
}

module_init(stand_in_init);
module_exit(stand_in_exit);
MODULE_VERSION(DRIVER_VERSION);
MODULE_LICENSE("Dual MIT/GPL");
