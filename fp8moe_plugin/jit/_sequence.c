// A sequence of kernel launches, prepared once: a call fills in addresses and launches every kernel of a layer.
//
// The parameters of all launches lie in one template. A call copies it to its own stack, writes the addresses that it
// is given where they belong, and calls the driver. It does not hold the GIL while it launches, as the driver waits
// where the stream's queue is full. jit/sequence.py has the same in Python, for installations without this extension.
//
// It needs neither CUDA's headers nor its libraries: the driver's functions come as addresses.
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { kTemplateBytes = 8192, kParameters = 64, kAddresses = 64, kAttributes = 2, kMapAlignment = 64 };  // at most

// From cuda.h: two of CUlaunchAttributeID, CUlaunchAttribute, CUlaunchConfig.
enum { kClusterDimension = 4, kProgrammaticStreamSerialization = 6 };

typedef struct {
    unsigned id;
    char pad[4];
    int value[16];
} LaunchAttribute;

typedef struct {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    void* stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
} LaunchConfig;

typedef int (*LaunchKernel)(const LaunchConfig*, void* function, void** parameters, void** extra);
typedef int (*ReplaceAddress)(void* tensor_map, void* address);

typedef struct {
    LaunchConfig config;
    LaunchAttribute attributes[kAttributes];
    void* function;
    int num_parameters, parameters[kParameters];  // where in the template
} Launch;

typedef struct {
    int at, slot, is_map;  // where in the template
    uint64_t offset;
} Patch;

typedef struct {
    PyObject head;
    LaunchKernel launch_kernel;
    ReplaceAddress replace_address;
    Py_ssize_t template_bytes, num_launches, num_patches, num_slots;
    char* template;
    Launch* launches;
    Patch* patches;
} Sequence;

static int read_parameters(Launch* launch, PyObject* offsets, Py_ssize_t template_bytes) {
    Py_ssize_t count = PyTuple_Size(offsets);
    if (count > kParameters) return PyErr_SetString(PyExc_ValueError, "a kernel has too many parameters"), -1;
    for (Py_ssize_t i = 0; i < count; ++i) {
        long offset = PyLong_AsLong(PyTuple_GetItem(offsets, i));
        if (PyErr_Occurred()) return -1;
        if (offset < 0 || offset >= template_bytes)
            return PyErr_SetString(PyExc_ValueError, "a parameter is outside the template"), -1;
        launch->parameters[launch->num_parameters++] = (int)offset;
    }
    return 0;
}

static void add_attribute(Launch* launch, unsigned id, int x, int y, int z) {
    LaunchAttribute* attribute = &launch->attributes[launch->config.num_attributes++];
    attribute->id = id;
    attribute->value[0] = x, attribute->value[1] = y, attribute->value[2] = z;
}

// Numbers are read as "i", which refuses what does not fit; "I" would take it modulo 2^32.
static int read_launches(Sequence* self, PyObject* launches) {
    self->num_launches = PyTuple_Size(launches);
    self->launches = PyMem_Calloc(self->num_launches + 1, sizeof(Launch));
    if (!self->launches) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < self->num_launches; ++i) {
        Launch* launch = &self->launches[i];
        LaunchConfig* config = &launch->config;
        unsigned long long function;
        int early, cluster;
        PyObject* offsets;
        if (!PyArg_ParseTuple(PyTuple_GetItem(launches, i), "KiiiipiO!", &function, &config->grid_x, &config->grid_y,
                              &config->block_x, &config->shared_bytes, &early, &cluster, &PyTuple_Type, &offsets))
            return -1;
        launch->function = (void*)(uintptr_t)function;
        config->grid_z = config->block_y = config->block_z = 1;
        if (early) add_attribute(launch, kProgrammaticStreamSerialization, 1, 0, 0);
        if (cluster > 1) add_attribute(launch, kClusterDimension, cluster, 1, 1);
        if (read_parameters(launch, offsets, self->template_bytes)) return -1;
    }
    return 0;
}

static int read_patches(Sequence* self, PyObject* patches) {
    self->num_patches = PyTuple_Size(patches);
    self->patches = PyMem_Calloc(self->num_patches + 1, sizeof(Patch));
    if (!self->patches) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < self->num_patches; ++i) {
        Patch* patch = &self->patches[i];
        unsigned long long offset;
        if (!PyArg_ParseTuple(PyTuple_GetItem(patches, i), "iiKp", &patch->at, &patch->slot, &offset, &patch->is_map))
            return -1;
        patch->offset = offset;
        if (patch->slot < 0 || patch->slot >= kAddresses)
            return PyErr_SetString(PyExc_ValueError, "a slot has no address"), -1;
        if (patch->at < 0 || patch->at > self->template_bytes - 8)
            return PyErr_SetString(PyExc_ValueError, "a patch is outside the template"), -1;
        if (patch->is_map && (patch->at % kMapAlignment || patch->at > self->template_bytes - 128))
            return PyErr_SetString(PyExc_ValueError, "a tensor map is not aligned"), -1;
        if (patch->slot >= self->num_slots) self->num_slots = patch->slot + 1;
    }
    return 0;
}

// From copies of the lists, which Python code that converts a number cannot change.
static int read_lists(Sequence* self, PyObject* launches, PyObject* patches) {
    PyObject *all_launches = PyList_AsTuple(launches), *all_patches = PyList_AsTuple(patches);
    int status = -1;
    if (all_launches && all_patches && !read_launches(self, all_launches)) status = read_patches(self, all_patches);
    Py_XDECREF(all_launches);
    Py_XDECREF(all_patches);
    return status;
}

// Sequence(template, launches, patches, cuLaunchKernelEx, cuTensorMapReplaceAddress), see jit/sequence.py.
static PyObject* sequence_new(PyTypeObject* type, PyObject* args, PyObject* keywords) {
    const char* template;
    Py_ssize_t template_bytes;
    PyObject *launches, *patches;
    unsigned long long launch_kernel, replace_address;
    (void)keywords;
    if (!PyArg_ParseTuple(args, "y#O!O!KK", &template, &template_bytes, &PyList_Type, &launches, &PyList_Type, &patches,
                          &launch_kernel, &replace_address))
        return NULL;
    if (template_bytes > kTemplateBytes)
        return PyErr_Format(PyExc_ValueError, "%zd bytes of parameters, %d at most", template_bytes, kTemplateBytes);
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Sequence* self = (Sequence*)allocate(type, 0);
    if (!self) return NULL;
    self->launch_kernel = (LaunchKernel)(uintptr_t)launch_kernel;
    self->replace_address = (ReplaceAddress)(uintptr_t)replace_address;
    self->template_bytes = template_bytes;
    self->template = PyMem_Malloc(template_bytes + 1);
    if (!self->template) PyErr_NoMemory();
    if (!self->template || read_lists(self, launches, patches)) {
        Py_DECREF(self);
        return NULL;
    }
    memcpy(self->template, template, template_bytes);
    return (PyObject*)self;
}

static void sequence_dealloc(PyObject* object) {
    Sequence* self = (Sequence*)object;
    PyTypeObject* type = Py_TYPE(object);
    PyMem_Free(self->template);
    PyMem_Free(self->launches);
    PyMem_Free(self->patches);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Writes the addresses into a copy of the template; the driver's status.
static int fill_in(const Sequence* self, const uint64_t* addresses, char* parameters) {
    memcpy(parameters, self->template, self->template_bytes);
    for (Py_ssize_t i = 0; i < self->num_patches; ++i) {
        const Patch* patch = &self->patches[i];
        uint64_t address = addresses[patch->slot] + patch->offset;
        if (!patch->is_map) {
            memcpy(parameters + patch->at, &address, sizeof address);
        } else {
            int status = self->replace_address(parameters + patch->at, (void*)(uintptr_t)address);
            if (status) return status;
        }
    }
    return 0;
}

// Launches the kernels; `*launched` of them before the status that is returned.
static int launch_all(const Sequence* self, char* parameters, void* stream, Py_ssize_t* launched) {
    void* pointers[kParameters];
    for (*launched = 0; *launched < self->num_launches; ++*launched) {
        const Launch* launch = &self->launches[*launched];
        LaunchConfig config = launch->config;
        config.stream = stream;
        config.attributes = (LaunchAttribute*)launch->attributes;
        for (int j = 0; j < launch->num_parameters; ++j) pointers[j] = parameters + launch->parameters[j];
        int status = self->launch_kernel(&config, launch->function, pointers, NULL);
        if (status) return status;
    }
    return 0;
}

// run(addresses, stream): None, or (status of the driver, kernels launched before that).
static PyObject* sequence_run(PyObject* object, PyObject* const* args, Py_ssize_t num_args) {
    const Sequence* self = (Sequence*)object;
    _Alignas(kMapAlignment) char parameters[kTemplateBytes];
    uint64_t addresses[kAddresses];
    if (num_args != 2 || !PyTuple_Check(args[0]))
        return PyErr_SetString(PyExc_TypeError, "run takes a tuple of addresses and a stream"), NULL;
    Py_ssize_t given = PyTuple_Size(args[0]);
    if (given < self->num_slots || given > kAddresses)
        return PyErr_Format(PyExc_ValueError, "%zd addresses, %zd to %d are needed", given, self->num_slots,
                            kAddresses);
    for (Py_ssize_t i = 0; i < given; ++i) addresses[i] = PyLong_AsUnsignedLongLong(PyTuple_GetItem(args[0], i));
    void* stream = PyLong_AsVoidPtr(args[1]);
    if (PyErr_Occurred()) return NULL;

    Py_ssize_t launched = 0;
    PyThreadState* thread = PyEval_SaveThread();
    int status = fill_in(self, addresses, parameters);
    if (!status) status = launch_all(self, parameters, stream, &launched);
    PyEval_RestoreThread(thread);
    if (!status) Py_RETURN_NONE;
    return Py_BuildValue("in", status, launched);
}

static PyMethodDef methods[] = {
    {"run", (PyCFunction)(void (*)(void))sequence_run, METH_FASTCALL, "Launch the kernels with these addresses."},
    {NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, sequence_new},
    {Py_tp_dealloc, sequence_dealloc},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec spec = {"fp8moe_plugin.jit._sequence.Sequence", sizeof(Sequence), 0, Py_TPFLAGS_DEFAULT, slots};

static int add_type(PyObject* module) {
    PyObject* type = PyType_FromSpec(&spec);
    int status = type ? PyModule_AddObjectRef(module, "Sequence", type) : -1;
    Py_XDECREF(type);
    return status;
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, add_type}, {0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_sequence",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__sequence(void) { return PyModuleDef_Init(&module); }
