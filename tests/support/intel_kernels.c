/* MKL asks who made the processor, and keeps its best kernels for one answer. Preloaded, this gives
   it, so that the kernels of Intel's processors are tested on others that have their instructions. */
int mkl_serv_intel_cpu(void) { return 1; }
int mkl_serv_intel_cpu_true(void) { return 1; }
