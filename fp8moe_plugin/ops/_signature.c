// What an op must know of its tensors to tell whether it has seen such a call before, read in one go.
//
// torch gives each field of a tensor to Python as an object of its own, which for the tensors of a layer takes as long
// as the launches. DLPack's exchange interface gives them to C. ops/signature.py has the same in Python, for
// installations without this extension.
//
// It needs none of torch's headers or libraries: the interface comes as a capsule.
#define Py_LIMITED_API 0x030b0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { kTensors = 16, kDims = 8 };  // at most
enum { kInt = 0, kUnsigned = 1 };   // codes of DLPack's dtypes

// From dlpack.h, version 1: DLTensor, DLPackExchangeAPI.
typedef struct {
    void* data;
    int32_t device[2];  // type and index
    int32_t dims;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DlTensor;

typedef struct {
    uint32_t major, minor;
    void *previous, *allocate, *export_managed, *import_managed;
    int (*describe)(void* tensor, DlTensor* out);
    void* current_stream;
} Exchange;

// One tensor in a signature, followed by its shape and strides. `dims` is -1 for None.
typedef struct {
    uint64_t dtype;  // of integers of a byte: torch's object, as DLPack says the same of uint8 and of torch's uint4
    int32_t device[2], dims;
    uint8_t code, bits, requires_grad, address;  // the address modulo 16, or kNoAddress
} Header;

enum { kNoAddress = 255, kBytes = kTensors * (sizeof(Header) + 2 * kDims * sizeof(int64_t)) };

static char* append(char* to, const void* from, size_t bytes) {
    memcpy(to, from, bytes);
    return to + bytes;
}

// What DLPack does not say of a tensor; 0 with an exception. Python code may run, and change the tensor.
static int read_attributes(PyObject* object, int grad, Header* header) {
    if (header->bits == 8 && (header->code == kInt || header->code == kUnsigned)) {
        PyObject* dtype = PyObject_GetAttrString(object, "dtype");
        if (!dtype) return 0;
        header->dtype = (uintptr_t)dtype;  // torch never frees it
        Py_DECREF(dtype);
    }
    if (grad) {
        PyObject* requires_grad = PyObject_GetAttrString(object, "requires_grad");
        if (!requires_grad) return 0;
        header->requires_grad = requires_grad == Py_True;
        Py_DECREF(requires_grad);
    }
    return 1;
}

// 1, or 0 if this is nothing that a signature can describe, or -1 with an exception.
static int describe(const Exchange* exchange, PyObject* object, int grad, char** at, uint64_t* address) {
    Header header = {.dims = -1};
    char* const begin = *at;
    *at += sizeof header;
    if (object != Py_None) {
        DlTensor tensor = {0};
        if (exchange->describe(object, &tensor)) return PyErr_Clear(), 0;
        if (tensor.dims > kDims || tensor.lanes != 1) return 0;
        *address = (uintptr_t)tensor.data + tensor.byte_offset;
        header.device[0] = tensor.device[0], header.device[1] = tensor.device[1], header.dims = tensor.dims;
        header.code = tensor.code, header.bits = tensor.bits;
        header.address = *address ? *address % 16 : kNoAddress;
        *at = append(*at, tensor.shape, tensor.dims * sizeof(int64_t));
        *at = append(*at, tensor.strides, tensor.dims * sizeof(int64_t));
        if (!read_attributes(object, grad, &header)) return -1;
    }
    append(begin, &header, sizeof header);
    return 1;
}

static PyObject* integers(const uint64_t* values, Py_ssize_t count) {
    PyObject* tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; ++i) {
        PyObject* value = PyLong_FromUnsignedLongLong(values[i]);
        if (!value) return Py_DECREF(tuple), NULL;
        PyTuple_SetItem(tuple, i, value);
    }
    return tuple;
}

// describe(exchange, tensors, grad): (signature, addresses), or None; see ops/signature.py.
static PyObject* describe_all(PyObject* module, PyObject* const* args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 3 || !PyTuple_Check(args[1]))
        return PyErr_SetString(PyExc_TypeError, "describe takes a capsule, a tuple of tensors and a bool"), NULL;
    const Exchange* exchange = PyCapsule_GetPointer(args[0], "dlpack_exchange_api");
    if (!exchange) return NULL;
    Py_ssize_t count = PyTuple_Size(args[1]);
    if (exchange->major != 1 || count > kTensors) Py_RETURN_NONE;
    char bytes[kBytes], *at = bytes;
    uint64_t addresses[kTensors] = {0};
    for (Py_ssize_t i = 0; i < count; ++i) {
        int status = describe(exchange, PyTuple_GetItem(args[1], i), args[2] == Py_True, &at, &addresses[i]);
        if (status < 0) return NULL;
        if (!status) Py_RETURN_NONE;
    }
    PyObject* signature = PyBytes_FromStringAndSize(bytes, at - bytes);
    PyObject* tuple = integers(addresses, count);
    PyObject* both = signature && tuple ? PyTuple_Pack(2, signature, tuple) : NULL;
    Py_XDECREF(signature);
    Py_XDECREF(tuple);
    return both;
}

static PyMethodDef methods[] = {
    {"describe", (PyCFunction)(void (*)(void))describe_all, METH_FASTCALL, "The signature and addresses of tensors."},
    {NULL},
};

static PyModuleDef_Slot module_slots[] = {{0, NULL}};

static struct PyModuleDef module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_signature",
    .m_methods = methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__signature(void) { return PyModuleDef_Init(&module); }
