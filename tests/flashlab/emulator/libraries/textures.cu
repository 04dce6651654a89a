// Texture objects: fetches by index and by coordinates.
__global__ void by_index(cudaTextureObject_t t, float4* y, int n) {
  int i = threadIdx.x - 1;  // from outside to outside
  if (threadIdx.x < n) y[threadIdx.x] = tex1Dfetch<float4>(t, i);
}

__global__ void by_place(cudaTextureObject_t t, const float2* at, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = tex2D<float>(t, at[i].x, at[i].y);
}

__global__ void layers(CUtexObject images, cudaTextureObject_t rows, float* y) {
  const int i = threadIdx.x;
  y[i] = tex2DLayered<float>(images, 2.0f, 3.0f, i - 1);  // between four pixels
  y[blockDim.x + i] = tex1DLayered<float>(rows, 2.0f, i - 1);
}
