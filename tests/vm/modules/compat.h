/* SPDX-License-Identifier: MIT OR GPL-2.0 */
/* What differs between the kernels that these stand-ins are built for. */
#include <linux/device.h>
#include <linux/version.h>

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 4, 0)
#define stand_in_class(name) class_create(name)
#else
#define stand_in_class(name) class_create(THIS_MODULE, name)
#endif
