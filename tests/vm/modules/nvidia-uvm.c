// SPDX-License-Identifier: MIT OR GPL-2.0
/* Stand-in for nvidia-uvm: depends on nvidia; /dev/nvidia-uvm has a dynamic major number, as the real one's. */
#include <linux/fs.h>
#include <linux/module.h>
#include "compat.h"

extern int nvidia_get_rm_ops(void);
static int major;
static struct class *class;

static int device_open(struct inode *inode, struct file *file)
{
	return 0;
}

static const struct file_operations operations = { .owner = THIS_MODULE, .open = device_open, .llseek = noop_llseek };

static int __init stand_in_init(void)
{
	int result = nvidia_get_rm_ops();

	if (result)
		return result;
	major = register_chrdev(0, "nvidia-uvm", &operations);
	if (major < 0)
		return major;
	class = stand_in_class("nvidia-uvm");
	if (IS_ERR(class)) {
		unregister_chrdev(major, "nvidia-uvm");
		return PTR_ERR(class);
	}
	device_create(class, NULL, MKDEV(major, 0), NULL, "nvidia-uvm");
	return 0;
}

static void __exit stand_in_exit(void)
{
	device_destroy(class, MKDEV(major, 0));
	class_destroy(class);
	unregister_chrdev(major, "nvidia-uvm");
}

module_init(stand_in_init);
module_exit(stand_in_exit);
MODULE_LICENSE("Dual MIT/GPL");
