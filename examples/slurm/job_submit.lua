-- Beside slurm.conf, with JobSubmitPlugins=lua: tells users of shares what is wrong when they submit, instead of in the job's output.
-- Adapt these: the partition of the nodes with shares, the memory of one of their GPUs, and what a kernel takes of the host's memory.
local PARTITION, GPU_MIB, KERNEL_MIB = "gpu", 81920, 1024

local function number(value) -- what is not set is nil or one of Slurm's largest numbers
  return value and value < slurm.NO_VAL64 and value or nil
end

local function check(job)
  local asked = job.tres_per_node or ""
  local milli = tonumber(asked:match("jgpu:open:(%d+)"))
  if not milli then
    if asked:match("jgpu") then
      slurm.log_user("ask for a share as --gres=jgpu:open:N, in thousandths of a GPU (250: a quarter)")
      return slurm.ERROR
    end
    if job.partition == PARTITION then
      slurm.log_user("partition %s is for jobs with a share of a GPU: --gres=jgpu:open:250", PARTITION)
      return slurm.ERROR
    end
    return slurm.SUCCESS
  end
  local per_cpu, cpus = number(job.min_mem_per_cpu), number(job.min_cpus) or 1
  local has = number(job.min_mem_per_node) or (per_cpu and per_cpu * cpus)
  local need = KERNEL_MIB + GPU_MIB * milli / 1000
  if has and has > 0 and has < need then -- 0: all memory of the node
    slurm.log_user("a share of %d thousandths needs --mem=%dM: what a kernel has on the GPU is saved there while it idles", milli, need)
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

function slurm_job_submit(job, partitions, uid)
  return check(job)
end

function slurm_job_modify(job, record, partitions, uid)
  return slurm.SUCCESS
end

return slurm.SUCCESS
