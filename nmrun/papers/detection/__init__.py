"""Images with instances (COCO), and Mask R-CNN: a table of SR-STE."""
